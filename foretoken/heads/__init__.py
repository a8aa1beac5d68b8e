"""Networks trained on the target's features: what they compute, in training and while drafting, from the same lines."""
