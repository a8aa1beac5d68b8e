"""What holds for every test: one thread, the same examples in every run, and Triton's interpreter for its kernels."""

import os

# Read when a kernel is defined, and some libraries bring triton in: so before anything else is imported.
if os.environ.get("FORETOKEN_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import settings
from made_once import shared_folder

# The tensors here are tiny, and two threads that share a busy machine take ten times as long as one.
torch.set_num_threads(1)

# A run that finds another failure than the last one helps nobody; a deadline measures the machine's other users.
settings.register_profile("foretoken", derandomize=True, deadline=None, database=None)
settings.load_profile("foretoken")

shared_folder()  # before xdist starts processes, which know it from the environment
