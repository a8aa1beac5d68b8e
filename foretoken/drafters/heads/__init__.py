"""What drafters over trained heads have in common: features kept, trees chosen and filled."""
