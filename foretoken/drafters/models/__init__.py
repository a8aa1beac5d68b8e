"""What drafting with a second language model is made of."""
