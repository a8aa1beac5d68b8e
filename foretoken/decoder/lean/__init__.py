"""A forward pass for the common pre-norm decoder block, on our own kernels or on torch's."""
