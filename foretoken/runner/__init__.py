"""A model over KV slots: prefill, verify, commit; the choice of a decoder, and the self-test at load."""
