"""The HTTP server: an OpenAI-compatible API over the engine."""
