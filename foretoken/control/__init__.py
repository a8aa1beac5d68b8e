"""How much to draft and to verify, for whom: controllers, and what passes cost. Knows no drafter and no engine."""
