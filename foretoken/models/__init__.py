"""Code around transformers: loading and checks of models, attention plug-in, features, the generic decoder."""
