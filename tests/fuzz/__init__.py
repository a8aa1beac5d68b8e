"""Random requests, models, checkpoints, caches, threads, HTTP bodies: whatever comes in is answered or clearly refused.

`python -m tests.fuzz TARGET --count N --seed S` runs by hand; `test_fuzz.py` runs some of each in every test run.
"""
