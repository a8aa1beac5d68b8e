"""Text indexes of drafters: suffix trees, and a sorted corpus in files."""
