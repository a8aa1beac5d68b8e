"""Which path of a verified tree survives: pure functions of tree, target distributions and explicit decisions.

Deliberately unknown here: models, KV rows, which drafter made the tree, where random numbers come from.
"""
