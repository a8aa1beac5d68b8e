"""Cost twins: small trained models, padded to the cost of a larger model without a change of their text."""
