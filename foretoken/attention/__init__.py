"""Attention of tree nodes over a slot cache: the readable definition, and the fast path on stock kernels."""
