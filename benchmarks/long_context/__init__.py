"""Measures drafting behind long texts: by rows and batch size, and by the position in the output."""
