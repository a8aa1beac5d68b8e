"""Measuring and proving: drafters side by side against plain decoding, and the comparison of their texts."""
