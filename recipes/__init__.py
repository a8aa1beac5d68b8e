"""Recipes: scripts that build the models this repository ships; not part of the installed package."""
