"""What holds for every test.  The limit of time for each is in pyproject.toml."""

import os

# Many workers share few cores: one thread each, also in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines say that they have AMX and do not let it be used: there torch's products of bfloat16, as Muon's, end the process with an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)
