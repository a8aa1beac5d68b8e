"""Data structures for lookups of token sequences; know no drafter."""
