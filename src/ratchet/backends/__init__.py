"""Concrete models, behind the protocols in `base.py`."""
