"""A load generator for servers with OpenAI's API, whose results have the keys of vLLM's `bench serve`."""
