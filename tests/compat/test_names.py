"""Under compat, torch's modules have every name that the installed torch's have, and the names work or say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.workers import Group

MODULES = [
    "torch._C._distributed_autograd",
    "torch._C._distributed_rpc",
    "torch.distributed.autograd",
    "torch.distributed.nn",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.optim",
    "torch.distributed.optim.optimizer",
    "torch.distributed.rpc",
    "torch.distributed.rpc._utils",
    "torch.distributed.rpc.api",
    "torch.distributed.rpc.backend_registry",
    "torch.distributed.rpc.constants",
    "torch.distributed.rpc.functions",
    "torch.distributed.rpc.internal",
    "torch.distributed.rpc.options",
    "torch.distributed.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler",
]
LEFT_OUT = {
    (
        "torch.distributed.rpc",
        "_init_counter",
    ): "counts init_rpc calls for torch's store; farstep counts its own",
    ("torch.distributed.rpc", "_init_counter_lock"): "guards that count",
    ("torch.distributed.rpc.api", "docstring"): "what a loop left behind",
    ("torch.distributed.rpc.api", "method"): "what a loop left behind",
    ("torch.distributed.rpc.api", "method_name"): "what a loop left behind",
    ("torch.distributed.rpc.internal", "_thread_local_tensor_tables"): "where torch's pickler keeps tensors",
    ("torch.distributed.rpc.internal", "_pickler"): "Python's; another one put there would not be used",
    ("torch.distributed.rpc.internal", "_unpickler"): "Python's; another one put there would not be used",
    (
        "torch.distributed.nn.api.remote_module",
        "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE",
    ): "TorchScript's templates",
}
"""Beside these, what torch's module imports for itself from Python or from other parts of torch, such as `os`."""

COMPARE = '''
import importlib, json, os, sys, types
import torch

MODULES = json.loads(sys.argv[1])


def is_import(module, value):
    """Whether the module has this from elsewhere: from Python, or from parts of torch that are not replaced."""
    if isinstance(value, types.ModuleType):
        return value.__name__ not in MODULES
    home = getattr(value, "__module__", None)
    if home is None or not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return home in ("typing", "__future__", "_thread") or module.endswith(".remote_module") and home == "types"
    return not home.startswith(("torch.distributed", "torch._C._distributed"))


def listing():
    """Each module's names, whether another package's, and its __all__."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    return {
        name: [
            {n: is_import(name, v) for n, v in vars(module).items() if not n.startswith("__") and n != "TYPE_CHECKING"},
            list(getattr(module, "__all__", [])),
        ]
        for name, module in modules.items()
    }


read, write = os.pipe()
if os.fork() == 0:
    with os.fdopen(write, "w") as pipe:
        json.dump(listing(), pipe)
    os._exit(0)
os.close(write)
with os.fdopen(read) as pipe:
    theirs = json.load(pipe)

import farstep.compat

farstep.compat.install()
missing, not_listed, still_torch = [], [], []
modules = {name: importlib.import_module(name) for name in MODULES}
for name, (names, listed) in theirs.items():
    ours = modules[name]
    missing += [(name, n) for n, imported in names.items() if not imported and not hasattr(ours, n)]
    not_listed += [(name, n) for n in listed if n not in ours.__all__ and not name.endswith(".optim")]
    for n, imported in names.items():
        value = getattr(ours, n, None)
        home = getattr(value, "__module__", "") or ""
        if isinstance(home, str) and home.startswith(("torch.distributed.rpc", "torch._C._distributed_rpc", "torch._C._distributed_autograd")):
            still_torch.append((name, n))
print(json.dumps([missing, not_listed, still_torch]))
'''

TORCHS_OWN = {
    "_create_device_list",
    "_create_reverse_mapping",
    "_group_membership_management",
    "_init_process_group",
    "_set_profiler_node_id",
    "_tensorpipe_exchange_and_check_all_device_maps",
    "_tensorpipe_validate_devices",
    "_to_device",
    "_to_device_list",
    "_to_device_map",
    "_validate_device_maps",
}
"""Functions that need no agent: torch's are used as they are."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_name_of_torchs_modules_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, json.dumps(MODULES)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    missing, not_listed, still_torch = json.loads(done.stdout)
    assert {tuple(pair) for pair in missing} - LEFT_OUT.keys() == set()
    assert not_listed == [], "`from … import *` gives less than torch's"
    assert {name for _, name in still_torch} <= TORCHS_OWN, "what is torch's own knows nothing of our agent"


# -- as torch_geometric and graphlearn-torch use them ---------------------------------------------------


def install() -> None:
    import farstep.compat

    farstep.compat.install()


def gather_as_torch_geometric(rank: int, init_method: str) -> list[object]:
    """Its torch_geometric.distributed.rpc: by private names, some of them from torch's C++ module."""
    from torch._C._distributed_rpc import _is_current_rpc_agent_set
    from torch.distributed import rpc
    from torch.distributed.rpc.rref_proxy import RRefProxy

    @rpc.api._require_initialized
    def all_gather(obj: object, timeout: float | None = None) -> object:
        return rpc.api._all_gather(obj) if timeout is None else rpc.api._all_gather(obj, timeout=timeout)

    seen: list[object] = [_is_current_rpc_agent_set()]
    with pytest.raises(RuntimeError, match="init_rpc first"):
        all_gather(1)
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["ibv", "uv"], _channels=["mpt_uv", "basic"], rpc_timeout=60.0, init_method=init_method
    )
    rpc.init_rpc(name=f"dist-{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    seen += [_is_current_rpc_agent_set(), all_gather(rank, timeout=50), sorted(rpc.api._ALL_WORKER_NAMES)]
    seen.append(gather_as_graphlearn(rank))
    others = rpc.remote(f"dist-{1 - rank}", int, args=(rank + 5,))
    seen.append(RRefProxy(others, rpc.rpc_async).__add__(1).wait())
    packed = rpc.internal.serialize(rpc.internal.PythonUDF(max, (rank, 7), {}))
    to = rpc.api._to_worker_info(1 - rank)
    seen.append(rpc._invoke_rpc_python_udf(to, *packed, 30.0, False).wait())
    del others
    rpc.shutdown(True, 50.0)
    seen.append(_is_current_rpc_agent_set())
    return seen


states: dict[int, object] = {}


def gather_as_graphlearn(rank: int) -> dict[str, object]:
    """graphlearn_torch.distributed.rpc: torch's class for one gathering, with functions of its own around it."""
    import threading
    import time

    from torch.distributed import rpc

    state = states.setdefault(0, rpc.AllGatherStates())
    assert isinstance(state.proceed_signal, threading.Event)  # type: ignore[attr-defined]
    rpc.rpc_sync("dist-0", bring, args=(f"dist-{rank}", rank * 10))
    if rank == 0:
        deadline = time.monotonic() + 50
        assert state.proceed_signal.wait(deadline - time.monotonic())  # type: ignore[attr-defined]
    return dict(rpc.rpc_sync("dist-0", gathered))


def bring(name: str, value: object) -> None:
    from torch.distributed import rpc

    state = states.setdefault(0, rpc.AllGatherStates())
    state.gathered_objects[name] = value  # type: ignore[attr-defined]
    if len(state.gathered_objects) == 2:  # type: ignore[attr-defined]
        state.proceed_signal.set()  # type: ignore[attr-defined]


def gathered() -> dict[str, object]:
    state = states[0]
    assert state.proceed_signal.wait(50)  # type: ignore[attr-defined]
    return dict(state.gathered_objects)  # type: ignore[attr-defined]


def test_the_names_work_as_two_public_programs_use_them(
    start_workers: Callable[..., Group], tmp_path: Path
) -> None:
    group = start_workers(2, setup=install)
    pending = [
        w.start(gather_as_torch_geometric, rank, f"file://{tmp_path}/r") for rank, w in enumerate(group)
    ]
    for rank, seen in enumerate(group.finish(pending)):
        gathered = {"dist-0": 0, "dist-1": 1}
        mine = [False, True, gathered, sorted(gathered), {"dist-0": 0, "dist-1": 10}, rank + 6, 7, False]
        assert seen == mine


def use_what_is_not_there() -> list[str]:
    """Each error, as its user reads it."""
    import torch.distributed.nn.api.remote_module as remote_module
    from torch.distributed import rpc
    from torch.distributed.optim import optimizer

    errors = []
    for use in (
        lambda: rpc._server_process_global_profile(),
        lambda: rpc.RemoteProfilerManager.set_current_profiling_key("key"),
        lambda: rpc._enable_jit_rref_pickle(),
        lambda: rpc._invoke_rpc_builtin("worker1", "aten::add", 1.0),
        lambda: rpc.enable_gil_profiling(True),
        lambda: rpc.backend_registry._get_device_infos(),
        lambda: rpc.internal._internal_rpc_pickler._register_reducer(dict, None),
        lambda: optimizer._new_script_local_optimizer(None, []),
        lambda: remote_module._instantiate_template(None, False),
    ):
        with pytest.raises(NotImplementedError) as caught:
            use()
        errors.append(str(caught.value))
    return errors


def test_what_farstep_has_not_says_what_to_do(start_workers: Callable[..., Group]) -> None:
    for error in start_workers(1, setup=install)[0].run(use_what_is_not_there):
        assert error.startswith("farstep "), error
        assert any(word in error for word in ("send ", "run ", "call ", "see ", "give ", "device_maps")), (
            error
        )
