"""Checkpoints of draft heads, one file a family. What a directory is, its tensors say, not its name."""
