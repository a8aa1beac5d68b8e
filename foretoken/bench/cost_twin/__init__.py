"""Cost twins: a small trained model padded, function preserved, to what a larger model costs."""
