"""Shows where speculation begins to pay: every bundled method on cost twins of several sizes."""
