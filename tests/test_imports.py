"""Importing farstep costs little more than importing torch: what is heavy is imported when it is used."""

import json
import subprocess
import sys

import pytest

IMPORT = """
import json, sys
import torch, torch.distributed.rpc
before = set(sys.modules)
import farstep.rpc, farstep.autograd, farstep.optim
calls = set(sys.modules) - before
import farstep.compat
farstep.compat.install()
compat = set(sys.modules) - before
import farstep.launch, farstep.cli, farstep.checkpoint
print(json.dumps([sorted(calls), sorted(compat), sorted(set(sys.modules) - before)]))
for package in (farstep.autograd, farstep.optim, farstep.state):
    for name in package.__all__:
        assert name in dir(package) and not isinstance(getattr(package, name), type(sys)), name
"""
HEAVY = (
    "cryptography fsspec matplotlib mpmath numpy.testing pandas rich safetensors sympy torch.distributed.nn"
)
HEAVY += (
    " torch.distributed.optim torch.distributed.fsdp torch.distributed.tensor torch.distributed.checkpoint"
)
OF_OTHER_USES = "farstep.autograd.picture farstep.autograd.svg farstep.checkpoint farstep.optim.sharded"
OF_OTHER_USES += " farstep.state.exchange farstep.demo farstep.cli xml"


def among(modules: list[str], names: str) -> list[str]:
    return [m for m in modules if any(m == name or m.startswith(name + ".") for name in names.split())]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_heavy_modules_wait_until_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    calls, compat, everything = json.loads(done.stdout)
    assert among(calls, HEAVY) == []
    assert among(calls, OF_OTHER_USES) == []
    assert among(compat, HEAVY) == []
    assert among(compat, OF_OTHER_USES) == []
    assert among(everything, HEAVY) == []
