"""Networks of the trained drafters; training and drafting run the same code."""
