"""Composition root, roles and processes."""
