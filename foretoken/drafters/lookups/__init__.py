"""Indexes of text that drafters look up in: suffix trees, and a sorted corpus in files."""
