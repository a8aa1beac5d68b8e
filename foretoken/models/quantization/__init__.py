"""Targets in 4 and 8 bits: models that are quantized at load, and checkpoints that others have quantized."""
