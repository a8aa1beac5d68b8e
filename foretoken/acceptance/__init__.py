"""Acceptance rules: which path of a verified tree is accepted, as pure functions of tree and target distributions.

The rules do not know models, KV rows, drafters, or the source of random numbers.
"""
