"""`ratchet status`: what a run does, and what it waits for."""
