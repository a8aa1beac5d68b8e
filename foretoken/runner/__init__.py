"""A model over KV slots: prefill, verify, commit; what passes cost, the choice of a decoder, the self-test at load."""
