"""Processes that do at random what programs do with connections, and a model that knows every byte. `scripts/torture` starts it."""
