"""How much to draft and to verify, for whom: the controllers. Knows no drafter and no engine."""
