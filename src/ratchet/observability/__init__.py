"""Logs, metrics and views of a run."""
