"""Everything that touches transformers: loading and checking models, attention plug-in, features, generic decoder."""
