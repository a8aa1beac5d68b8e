"""Attention of tree nodes over a slot cache: the reference in plain torch, and Triton and CUDA kernels."""
