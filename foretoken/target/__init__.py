"""Running the target: loading, KV slots, passes over trees, commit, taps. The only part that knows transformers."""
