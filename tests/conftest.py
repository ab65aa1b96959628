"""What holds for every test.  The limit of 60 seconds for each is in pyproject.toml."""

import os

# Many workers share few cores: one thread each, also in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
