"""Optimizer state of sharded models, beside torch's own functions: gathered, loaded, scattered, renamed. Time and peak memory.

    python -m bench.optim_state [--rounds N] [--only CASE ...]

Both sides run in the same processes, on models of their own that are alike, in turn and in shuffled order.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.__main__ import fork_server
from bench.group import Group
from bench.report import duration, ruled
from bench.worker import obey, quiet

LAYERS, WIDTH = 16, 1536
REKEYED = 10_000
SIDES = ("torch", "farstep")
TIMEOUT = timedelta(seconds=60)
Act = Callable[[], Any]
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Case:
    """`make(side)` gives what is timed; its targets are times faster than torch, by the number of ranks."""

    key: str
    title: str
    make: Callable[[str], Act]
    targets: dict[int, float]
    ranks: tuple[int, ...] = (2, 4)


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An AdamW with state, without the time that a backward pass takes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def fsdp1() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Flat parameters. With the original ones torch's full state is not the optimizer's on CPU: all keys are views of one buffer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = stack()
    for i, layer in enumerate(model):
        model[i] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return whole, stepped(whole)


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, stepped(model)


def full_of_fsdp2(side: str) -> Act:
    model, optimizer = fsdp2()
    if side == "torch":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return lambda: get_optimizer_state_dict(model, optimizer, options=options)
    from farstep.state import optim_state_dict

    return lambda: optim_state_dict(model, optimizer, full=True, rank0_only=True, cpu_offload=True)


def full_of_fsdp1(side: str) -> Act:
    model, optimizer = fsdp1()
    if side == "torch":
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            FullyShardedDataParallel,
            StateDictType,
        )

        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
        )
        return lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer)
    from farstep.fsdp import full_optim_state_dict

    return lambda: full_optim_state_dict(model, optimizer)


def loaded(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], from_rank0: bool
) -> Callable[[str], Act]:
    """A full state, on every rank or on the first alone, into the shards of an optimizer."""

    def case(side: str) -> Act:
        from farstep.state import load_optim_state_dict, optim_state_dict

        model, optimizer = make()
        whole = optim_state_dict(model, optimizer, full=True, rank0_only=from_rank0, cpu_offload=True)
        if side == "farstep":
            return lambda: load_optim_state_dict(model, optimizer, whole, broadcast_from_rank0=from_rank0)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        return lambda: set_optimizer_state_dict(model, optimizer, _as_torchs(whole), options=options)

    return case


def _as_torchs(state: dict[str, Any]) -> dict[str, Any]:
    """torch's setter changes the dict it is given, so it gets one of its own; the tensors are the same."""
    return (
        {
            "state": {name: dict(each) for name, each in state.get("state", {}).items()},
            "param_groups": [dict(each) for each in state.get("param_groups", [])],
        }
        if state
        else {}
    )


def scattered(side: str) -> Act:
    """FSDP1's own way to the same: a dict for load_state_dict."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from farstep.fsdp import full_optim_state_dict, scatter_full_optim_state_dict

    model, optimizer = fsdp1()
    whole = full_optim_state_dict(model, optimizer)
    if side == "farstep":
        return lambda: scatter_full_optim_state_dict(whole or None, model, optim=optimizer)
    return lambda: FullyShardedDataParallel.scatter_full_optim_state_dict(
        whole or None, model, optim=optimizer
    )


def rekeyed(side: str) -> Act:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from farstep.fsdp import OptimStateKeyType, rekey_optim_state_dict

    model = nn.Module()
    for i in range(REKEYED // 100):
        model.add_module(f"block{i}", nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(100)]))
    optimizer = stepped(model)
    state = optimizer.state_dict()
    rekey = rekey_optim_state_dict if side == "farstep" else FullyShardedDataParallel.rekey_optim_state_dict

    def both_ways() -> None:
        by_name = rekey(state, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        rekey(by_name, OptimStateKeyType.PARAM_ID, model, optim=optimizer)

    return both_ways


_MODEL = f"{LAYERS * WIDTH * (WIDTH + 1) / 1e6:.1f} million parameters"
CASES = [
    Case("full-fsdp2", "full state to rank 0, `fully_shard`", full_of_fsdp2, {2: 5.0, 4: 8.0}),
    Case("full-fsdp1", "full state to rank 0, FSDP1", full_of_fsdp1, {2: 5.0, 4: 8.0}),
    Case("load", "sharded load from full, `fully_shard`", loaded(fsdp2, False), {2: 2.0, 4: 2.0}),
    Case("scatter", "load from rank 0 alone, `fully_shard`", loaded(fsdp2, True), {2: 2.0, 4: 2.0}),
    Case("scatter-fsdp1", "scatter from rank 0, FSDP1", scattered, {2: 2.0, 4: 2.0}),
    Case("rekey", f"names for numbers and back, {REKEYED:,} parameters", rekeyed, {1: 2.0}, ranks=(1,)),
]
BY_KEY = {case.key: case for case in CASES}


# -- a rank -----------------------------------------------------------------------------------------------


def serve(pipe: Connection, log: str, store: str, rank: int, ranks: int) -> None:
    quiet(log)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def enter() -> dict[tuple[str, str], Act]:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT
        )
        return {}

    def answer(acts: dict[tuple[str, str], Act], command: tuple[Any, ...]) -> Any:
        verb, key, side, fresh = command
        if verb == "make":
            acts.clear()
            gc.collect()
            for each in SIDES:
                acts[key, each] = BY_KEY[key].make(each)
            return None
        return measured(acts[key, side], fresh)

    obey(pipe, enter, answer, lambda _: dist.destroy_process_group())


def measured(act: Act, fresh: bool) -> tuple[float, int]:
    """Seconds until all are done, and the most bytes that this process had beyond what it had before.

    These are right if `fresh`: then memory that was let go is given back first. The time is that of a process that goes on.
    """
    gc.collect()
    if fresh:
        _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = _status("VmRSS")
    dist.barrier()
    begun = time.perf_counter()
    kept = act()
    dist.barrier()
    seconds = time.perf_counter() - begun
    peak = _status("VmHWM") - before
    del kept
    return seconds, peak


def _status(field_name: str) -> int:
    found = re.search(rf"{field_name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# -- the run ----------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Seconds by round, extra bytes on rank 0, and the most on any other."""

    seconds: list[float] = field(default_factory=list)
    first_bytes: int = 0
    other_bytes: int = 0


def run(
    cases: list[Case], ranks: int, rounds: int, shuffler: random.Random, scratch: Path
) -> list[list[str]]:
    jobs = [
        (serve, (str(scratch / f"{ranks}-{rank}.log"), str(scratch / f"store{ranks}"), rank, ranks))
        for rank in range(ranks)
    ]
    group = Group(fork_server(), jobs)
    every = range(ranks)
    try:
        lines = []
        for case in cases:
            group.ask_all(every, [("make", case.key, "", False)] * ranks)
            figures = {side: Figures() for side in SIDES}
            for number in range(rounds + 1):  # the first is for memory, and to warm up
                for side in shuffler.sample(SIDES, len(SIDES)):
                    found = group.ask_all(every, [("run", case.key, side, not number)] * ranks)
                    if number:
                        figures[side].seconds.append(max(seconds for seconds, _ in found))
                    else:
                        figures[side].first_bytes = found[0][1]
                        figures[side].other_bytes = max([n for _, n in found[1:]], default=0)
            lines.append(_line(case, ranks, figures))
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
        return lines
    finally:
        group.close()


def _line(case: Case, ranks: int, figures: dict[str, Figures]) -> list[str]:
    base, subject = (figures[side] for side in SIDES)
    times = [b / s for b, s in zip(base.seconds, subject.seconds, strict=True)]
    median, target = statistics.median(times), case.targets[ranks]
    return [
        case.title,
        str(ranks),
        *(duration(statistics.median(each.seconds)) for each in (base, subject)),
        f"**{median:.1f}**",
        f"{min(times):.1f} to {max(times):.1f}",
        f"{target:g}",
        "met" if median >= target else "MISS",
        *(f"{each.first_bytes / 1e6:.0f} + {each.other_bytes / 1e6:.0f} MB" for each in (base, subject)),
    ]


HEAD = [
    "",
    "ranks",
    *SIDES,
    "times faster",
    "min to max",
    "target",
    "",
    *(f"extra memory, {s}" for s in SIDES),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.optim_state", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=sorted(BY_KEY), metavar="CASE")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or case.key in args.only]
    shuffler = random.Random(args.seed)
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    begun = time.monotonic()
    lines = []
    try:
        for ranks in (1, 2, 4):
            here = [case for case in cases if ranks in case.ranks]
            if here:
                lines += run(here, ranks, args.rounds, shuffler, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(
        f"\nAdamW, {_MODEL}, {args.rounds} rounds, {time.monotonic() - begun:.0f} s. Memory: rank 0 + the most of any other.\n"
    )
    print(ruled([HEAD, ["---", *["---:"] * 6, "---", "---:", "---:"], *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
