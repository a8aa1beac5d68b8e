"""Readers and writers for checkpoints of draft heads, one file a family; the tensors tell the format."""
