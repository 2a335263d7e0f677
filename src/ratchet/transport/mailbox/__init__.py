"""Typed messages between actors in different processes."""
