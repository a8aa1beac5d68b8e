"""Which path of a verified tree survives. Rules are pure functions of tree, target laws and explicit decisions.

Deliberately unknown here: models, KV rows, which drafter made the tree, where random numbers come from.
"""
