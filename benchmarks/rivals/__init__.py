"""Compares foretoken with other engines: same weights, prompts, precision and threads, one request at a time, in turn.

Every contestant is a worker process in the Python environment of its rival, so that no two engines share a library.
This package talks to workers; `benchmarks.rivals.workers` holds them, one file a rival.
"""
