"""Running the target: loading, KV slots, forward passes over trees, commit, taps. The only part that knows transformers."""
