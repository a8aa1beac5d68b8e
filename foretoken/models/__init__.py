"""What touches transformers: loading and checking models, attention plug-in, features, the generic decoder."""
