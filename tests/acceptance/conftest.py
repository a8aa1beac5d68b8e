"""One thread: the tensors here are tiny, and two threads that share a busy machine take ten times as long as one."""

import torch

torch.set_num_threads(1)
