"""Acceptance rules: which path of a verified tree survives, as pure functions of tree and target distributions.

Deliberately unknown here: models, KV rows, which drafter made the tree, where random numbers come from.
"""
