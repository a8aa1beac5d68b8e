"""Whole draft trees in one call of the native kernels, whose part for drafts is in `kernels`; see `decoder.library`."""
