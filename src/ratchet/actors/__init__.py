"""The actor runtime and the four actors."""
