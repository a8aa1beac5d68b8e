"""The decoding loop: sequences join, get drafts, are verified, committed and finish. Knows no drafter's name."""
