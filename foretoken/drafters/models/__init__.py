"""Parts of drafting with a second language model."""
