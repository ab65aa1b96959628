"""What is timed in gloo groups: steps of sharded optimizers, and gathering their state.

A case is a context manager that takes the ways that are wanted and yields the act of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Acts = dict[str, Callable[[], object]]
Case = Callable[[Sequence[str]], AbstractContextManager[Acts]]

LAYERS, WIDTH, WORDS = 10, 768, 36_900
ADAMW = {"lr": 1e-4}
DDP_BUCKET_BYTES = 25 << 20
LARGE, MEDIUM = 63_000_000, 24_000_000
FSDP_LAYERS, FSDP_WIDTH = 24, 1024


def shapes() -> list[tuple[int, ...]]:
    """Those of a small language model: 100 million parameters in 122 tensors."""
    layer: list[tuple[int, ...]] = [
        (WIDTH,),
        (WIDTH,),
        (3 * WIDTH, WIDTH),
        (3 * WIDTH,),
        (WIDTH, WIDTH),
        (WIDTH,),
        (WIDTH,),
        (WIDTH,),
        (4 * WIDTH, WIDTH),
        (4 * WIDTH,),
        (WIDTH, 4 * WIDTH),
        (WIDTH,),
    ]
    return [(WORDS, WIDTH), *(shape for _ in range(LAYERS) for shape in layer), (WIDTH,)]


@contextmanager
def zero(ways: Sequence[str]) -> Iterator[Acts]:
    """A replicated model, its gradients in flat buckets as DDP keeps them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from farstep.optim import ShardedOptimizer

    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.rand(shape)) for shape in shapes()]
    buckets = _buckets(parameters)
    named = {str(number): p for number, p in enumerate(parameters)}

    def torchs(**options: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options, **ADAMW)

    def ours(**options: Any) -> Any:
        return ShardedOptimizer(named, torch.optim.AdamW, **options, **ADAMW)

    def after_all_reduce(step: Callable[[], object]) -> Callable[[], object]:
        def act() -> None:
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()
            for bucket in buckets:
                bucket.div_(dist.get_world_size())
            step()

        return act

    made: dict[str, Any] = {}

    def once(key: str, make: Callable[[], Any]) -> Any:
        if key not in made:
            made[key] = make()
        return made[key]

    tuned = {"fused": True, "parameters_as_bucket_view": True}
    known: dict[str, Callable[[], Callable[[], object]]] = {
        "torch": lambda: once("torch", torchs).step,
        "torch tuned": lambda: once("tuned", lambda: torchs(**tuned)).step,
        "all-reduce, torch": lambda: after_all_reduce(once("torch", torchs).step),
        "all-reduce, torch tuned": lambda: after_all_reduce(once("tuned", lambda: torchs(**tuned)).step),
        "farstep": lambda: ours(reduce_gradients=False).step,
        "farstep, messages": lambda: ours(reduce_gradients=False, same_host=False).step,
        "reducing, farstep": lambda: ours().step,
        "reducing, farstep, messages": lambda: ours(same_host=False).step,
    }
    yield {way: known[way]() for way in ways}


def _buckets(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Gradients as views of flat buckets of DDP's size, which is how DDP reduces them without a copy."""
    found: list[torch.Tensor] = []
    waiting: list[nn.Parameter] = []
    for number, parameter in enumerate(reversed(parameters)):
        waiting.append(parameter)
        if sum(p.nbytes for p in waiting) >= DDP_BUCKET_BYTES or number == len(parameters) - 1:
            bucket = torch.full((sum(p.numel() for p in waiting),), 1e-3)
            at = 0
            for p in waiting:
                p.grad = bucket[at : at + p.numel()].view(p.shape)
                at += p.numel()
            found.append(bucket)
            waiting = []
    return found


def _fsdp2(layers: int, width: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 1e-3
    return model


@contextmanager
def fsdp2(ways: Sequence[str]) -> Iterator[Acts]:
    from farstep.optim import ShardedOptimizer

    model = _fsdp2(FSDP_LAYERS, FSDP_WIDTH)
    known: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        "farstep": lambda: ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **ADAMW),
    }
    yield {way: known[way]().step for way in ways}


def full_state(parameters: int, layers: int) -> Case:
    """The state of AdamW over an FSDP2 model, whole, in the first rank's main memory."""

    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        from farstep.optim import ShardedOptimizer

        warnings.simplefilter("ignore")
        model = _fsdp2(layers, int((parameters / layers) ** 0.5))
        acts: Acts = {}
        if "torch" in ways:
            torchs = torch.optim.AdamW(model.parameters(), **ADAMW)
            torchs.step()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            acts["torch"] = lambda: get_optimizer_state_dict(model, torchs, options=options)
        if "farstep" in ways:
            ours = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **ADAMW)
            ours.step()
            acts["farstep"] = lambda: ours.state_dict(full=True, rank0_only=True, cpu_offload=True)
        if len(acts) == 2:
            _compare(acts["torch"](), acts["farstep"]())
        yield acts

    return case


def _compare(one: Any, other: Any) -> None:
    if dist.get_rank() == 0 and one["state"].keys() != other["state"].keys():
        raise ValueError("the two states have other names")
    for name, state in other.get("state", {}).items():
        if not all(torch.allclose(one["state"][name][key], value, rtol=1e-4) for key, value in state.items()):
            raise ValueError(f"the two states of {name} differ")


def forget_peak() -> None:
    """From now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the kernel does not say how much memory this process has had")


CASES: dict[str, Case] = {
    "zero": zero,
    "fsdp2": fsdp2,
    "state-large": full_state(LARGE, 24),
    **{f"state-{layers}": full_state(MEDIUM, layers) for layers in (8, 24, 96, 384)},
}
