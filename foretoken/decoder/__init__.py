"""Forward passes over KV slots: the decoder interface, lean decoders, CUDA graphs. Does not use transformers."""
