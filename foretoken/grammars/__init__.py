"""Structured output: compiles grammars within limits, and applies grammars to drafts."""
