"""Measuring drafters against plain decoding, and comparing their texts with it."""
