"""Targets in 4 and 8 bits that are made here: quantized at load, or written as a checkpoint."""
