"""Workers: each file adapts one rival to the same four questions and runs in that rival's own environment.

A worker imports its rival, the standard library, `messages` and its neighbours here; nothing else is installed beside
every rival.
"""
