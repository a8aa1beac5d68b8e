"""What users call: `LLM`, `AsyncLLM`, their arguments, and requests on their way to the engine."""
