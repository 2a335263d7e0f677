"""`ratchet launch`: one role of a run on this node."""
