"""Heads of foretoken beside the projects whose formats it writes: same weights in, outputs compared."""
