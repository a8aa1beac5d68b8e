"""Training objectives of the heads, one file a method."""
