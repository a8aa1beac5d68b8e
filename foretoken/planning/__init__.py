"""Predicts what speculation gains before anything is trained: costs of passes, acceptance curves, plans, verdicts."""
