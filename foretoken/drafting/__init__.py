"""Calls drafters, guards the engine against them, and controls how much they draft."""
