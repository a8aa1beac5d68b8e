"""Text turned into packed token windows for training heads: sources, chat masks, self-distillation, storage."""
