"""Sampling: position-keyed noise, logits processors, and target distributions at tree nodes."""
