"""What several kinds of drafters are made of."""
