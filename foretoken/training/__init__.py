"""Training draft heads on a frozen target, and telling beforehand and afterwards what they will bring when served."""
