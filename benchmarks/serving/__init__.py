"""Compares servers with OpenAI's API under one load: foretoken with and without speculation, vLLM, transformers."""
