"""Reading and writing checkpoints of draft heads, one file a family; the format is told by the tensors."""
