"""Forward passes over KV slots: what a decoder is, lean decoders, CUDA graphs. Knows no transformers."""
