"""Which tests PyTorch's suite has.

The names are read from the wheel's source text, because importing the suite takes seconds and
would happen on every ``pytest`` call, whichever tests it selects.  That the reading is right is
itself tested (``test_catalogue_is_complete``).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

_ROOT = "testing/_internal/distributed"

#: test class -> the file of the torch package that defines it
SUITES = {
    "RpcTest": f"{_ROOT}/rpc/rpc_test.py",
    "DistAutogradTest": f"{_ROOT}/rpc/dist_autograd_test.py",
    "TensorPipeAgentDistAutogradTest": f"{_ROOT}/rpc/dist_autograd_test.py",
    "DistOptimizerTest": f"{_ROOT}/rpc/dist_optimizer_test.py",
    "DdpUnderDistAutogradTest": f"{_ROOT}/ddp_under_dist_autograd_test.py",
    "DdpComparisonTest": f"{_ROOT}/ddp_under_dist_autograd_test.py",
    "RemoteModuleTest": f"{_ROOT}/nn/api/remote_module_test.py",
    "ThreeWorkersRemoteModuleTest": f"{_ROOT}/nn/api/remote_module_test.py",
    "ParameterServerTest": f"{_ROOT}/rpc/examples/parameter_server_test.py",
    "ReinforcementLearningRpcTest": f"{_ROOT}/rpc/examples/reinforcement_learning_rpc_test.py",
}


def torch_directory() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _methods(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    found: set[str] = set()
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _methods(classes, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.add(node.name)
    return found


def tests() -> list[str]:
    """Every test as ``Suite.test_name``, sorted within its suite."""
    torch = torch_directory()
    return [
        f"{suite}.{method}"
        for suite, file in SUITES.items()
        for method in sorted(_methods(_classes(torch / file), suite))
    ]
