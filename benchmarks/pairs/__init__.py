"""A real target with drafters, beside rivals on the same file, request by request."""
