"""Random requests, models, checkpoints, caches, threads and HTTP bodies: whatever comes in, an answer or a clear refusal comes out.

`python -m tests.fuzz TARGET --count N --seed S` runs by hand; `test_fuzz.py` runs some of each in every test run.
"""
