"""Advantages, losses and packing."""
