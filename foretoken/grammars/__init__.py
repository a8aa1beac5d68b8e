"""Forms that output must have: compiling them within bounds, and what of a draft they allow and force."""
