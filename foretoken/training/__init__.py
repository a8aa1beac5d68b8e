"""Training draft heads on a frozen target, and checks of target and head before and after it."""
