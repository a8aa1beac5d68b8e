"""Workers, one file an engine: each answers the same four requests and runs in that engine's own environment.

A worker imports its rival, the standard library, `messages` and the modules here; nothing else is installed beside
every rival.
"""
