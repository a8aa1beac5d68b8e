"""From target logits to a choice: position-keyed noise, processors with each node's own history, log-probabilities."""
