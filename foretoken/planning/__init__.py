"""Predicts what speculation gains before anything is trained or bought: closed forms, costs, acceptance curves."""
