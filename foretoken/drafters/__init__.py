"""Drafters: one file per method, found by name. A drafter knows neither the engine nor other drafters."""
