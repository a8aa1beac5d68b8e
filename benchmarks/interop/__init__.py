"""Compares heads that foretoken writes with the projects whose formats these are: same weights, same outputs."""
