"""Draft trees: shapes, expansion, merging and pruning."""
