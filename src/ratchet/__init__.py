"""Ratchet: fully asynchronous reinforcement learning of language models, as typed actors."""
