"""What holds for every test: one thread, and the same examples in every run."""

import torch
from hypothesis import settings

# The tensors here are tiny, and two threads that share a busy machine take ten times as long as one.
torch.set_num_threads(1)

# A run that finds another failure than the last one helps nobody; a deadline measures the machine's other users.
settings.register_profile("foretoken", derandomize=True, deadline=None, database=None)
settings.load_profile("foretoken")
