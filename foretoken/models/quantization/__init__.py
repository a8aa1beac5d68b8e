"""Targets in 4 and 8 bits: models that are rounded at load, and checkpoints that others have rounded."""
