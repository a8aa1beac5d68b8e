"""Common parts of drafters over trained heads: features, choice of trees, tree construction."""
