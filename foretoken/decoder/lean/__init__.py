"""A forward of our own for the common pre-norm decoder block: on kernels of our own, or on torch's."""
