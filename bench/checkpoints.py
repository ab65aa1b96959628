"""Checkpoints: saved so that they outlive the machine, loaded and checked, beside torch's own, `torch.save`, safetensors and the disk itself.

The state is that of a model and AdamW, three tensors for each layer, cut over the ranks along their first dimension. Every way writes and reads the same
bytes; all but the raw ones do it by their own means.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.sharded import Acts, Case

LAYERS = 21
SIZES = {"1 GB": 4, "4 GB": 16}
"""Rows of a layer's tensors, in units of a million elements."""
WIDTH = 1024
PLACES = {"tmpfs": "/dev/shm", "disk": "."}
SMALL_TENSORS, SMALL_NUMEL = 100_000, 16
BOXES_SAVED, BOXES_OPENED = "saved", "opened, and its manifest checked"
BOXES_LOADED, BOXES_WHOLE = "loaded into as many boxes", "loaded into whole tensors"
Act = Callable[[], Any]


def spread_state(millions: int, ranks: Sequence[int] | None = None, fill: bool = True) -> dict[str, Any]:
    """DTensors over all ranks, or over some of them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    members = list(ranks if ranks is not None else range(dist.get_world_size()))
    mesh = DeviceMesh("cpu", members)
    if dist.get_rank() not in members:
        return {}
    rows = millions * (1 << 20) // WIDTH // len(members)
    shape = torch.Size((millions * (1 << 20) // WIDTH, WIDTH))
    state = {}
    for layer in range(LAYERS):
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            local = torch.randn(rows, WIDTH) if fill else torch.zeros(rows, WIDTH)
            state[f"layers.{layer}.{key}"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(WIDTH, 1)
            )
    return state


def plain_state(millions: int) -> dict[str, torch.Tensor]:
    """All of it, on this rank."""
    shape = (millions * (1 << 20) // WIDTH, WIDTH)
    return {
        f"layers.{layer}.{key}": torch.zeros(shape)
        for layer in range(LAYERS)
        for key in ("weight", "exp_avg", "exp_avg_sq")
    }


def local_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.to_local() for name, value in state.items()}


@contextmanager
def folder(place: str) -> Iterator[Path]:
    """The same on all ranks; gone afterwards."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parent = multiprocessing.parent_process()
    assert parent is not None
    prefix = _prefix(parent.pid)
    names = [tempfile.mkdtemp(prefix=prefix, dir=PLACES[place]) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0]).resolve()
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def clear() -> None:
    """What processes of this one have left that were killed."""
    for place in PLACES.values():
        for each in Path(place).glob(f"{_prefix(os.getpid())}*"):
            shutil.rmtree(each, ignore_errors=True)


def _prefix(pid: int | None) -> str:
    return f"bench-checkpoint-{pid}-"


def saving(size: str, place: str) -> Case:
    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        import torch.distributed.checkpoint as dcp
        from safetensors.torch import save_file

        from farstep import checkpoint

        with folder(place) as path:
            state = spread_state(SIZES[size])
            local, own = local_of(state), path / f"{dist.get_rank()}"

            def by_torch() -> None:
                torch.save(local, own)
                _sync(own)

            def by_safetensors() -> None:
                save_file(local, own)
                _sync(own)

            known: dict[str, Act] = {
                "DCP": lambda: dcp.save(state, checkpoint_id=path / "dcp"),
                "farstep": lambda: checkpoint.save(state, path / "farstep"),
                "torch.save": by_torch,
                "safetensors": by_safetensors,
                "raw": lambda: _write(own, local.values()),
            }
            yield {way: _afresh(known[way], path) for way in ways}

    return case


def _afresh(act: Act, path: Path) -> Act:
    """Nothing is there before: what overwrites its last file is not what is measured."""

    def prepared() -> Act:
        dist.barrier()
        if dist.get_rank() == 0:
            for each in path.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        dist.barrier()
        return act

    return Prepared(prepared)


class Prepared:
    """An act with something before it that is not timed."""

    def __init__(self, prepare: Callable[[], Act]) -> None:
        self.prepare = prepare

    def __call__(self) -> Any:
        return self.prepare()()


@dataclass(frozen=True)
class Begun:
    """What an act has left to be done in the background: that is waited for, and not timed."""

    finish: Callable[[], object]


@dataclass(frozen=True)
class Stored:
    """What an act has written."""

    path: Path

    @property
    def nbytes(self) -> int:
        return sum(each.stat().st_size for each in self.path.iterdir())


def loading(size: str, place: str) -> Case:
    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        import torch.distributed.checkpoint as dcp
        from safetensors.torch import load_file, save_file

        from farstep import checkpoint

        with folder(place) as path:
            state = spread_state(SIZES[size])
            local, own = local_of(state), path / f"{dist.get_rank()}"
            if "DCP" in ways:
                dcp.save(state, checkpoint_id=path / "dcp")
            if "farstep" in ways:
                checkpoint.save(state, path / "farstep")
            if "torch.save" in ways:
                torch.save(local, f"{own}.pt")
            if {"safetensors", "raw"} & set(ways):
                save_file(local, own)

            def into_place(found: dict[str, torch.Tensor]) -> None:
                for name, tensor in found.items():
                    local[name].copy_(tensor)

            known: dict[str, Act] = {
                "DCP": lambda: dcp.load(state, checkpoint_id=path / "dcp"),
                "farstep": lambda: checkpoint.load(state, path / "farstep"),
                "torch.save": lambda: into_place(torch.load(f"{own}.pt", mmap=True)),
                "safetensors": lambda: into_place(load_file(own)),
                "raw": lambda: _read(own, local.values()),
            }
            yield {way: known[way] for way in ways}

    return case


def resharding(size: str, place: str, whole: bool) -> Case:
    """What two ranks saved, into shards on all ranks, or whole on each."""

    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        import torch.distributed.checkpoint as dcp

        from farstep import checkpoint

        with folder(place) as path:
            pair = dist.new_group([0, 1])
            saved = spread_state(SIZES[size], [0, 1])
            if saved:
                dcp.save(saved, checkpoint_id=path / "dcp", process_group=pair)
                checkpoint.save(saved, path / "farstep", group=pair)
            del saved
            dist.barrier()
            state = plain_state(SIZES[size]) if whole else spread_state(SIZES[size], fill=False)
            known: dict[str, Act] = {
                "DCP": lambda: dcp.load(state, checkpoint_id=path / "dcp"),
                "farstep": lambda: checkpoint.load(state, path / "farstep"),
            }
            yield {way: known[way] for way in ways}

    return case


def stalling(size: str, place: str) -> Case:
    """How long a training waits when its state is saved in the background."""

    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from farstep import checkpoint

        with folder(place) as path:
            state = spread_state(SIZES[size])
            # What it has for a GPU it refuses to do without one.
            stager = DefaultStager(StagingOptions(False, False, False, False))

            def by_dcp(**options: Any) -> Begun:
                return Begun(dcp.async_save(state, checkpoint_id=path / "dcp", **options).result)

            def copied() -> None:
                for name, tensor in local_of(state).items():
                    copies[name].copy_(tensor)

            copies = {name: t.clone() for name, t in local_of(state).items()} if "memcpy" in ways else {}
            known: dict[str, Act] = {
                "DCP": by_dcp,
                "DCP, stager reused": lambda: by_dcp(async_stager=stager),
                "farstep": lambda: Begun(checkpoint.async_save(state, path / "farstep").wait),
                "memcpy": copied,
            }
            yield {way: known[way] for way in ways}

    return case


def small_tensors() -> dict[str, torch.Tensor]:
    return {
        f"layers.{i // 10}.weight.{i % 10}": torch.full((SMALL_NUMEL,), float(i))
        for i in range(SMALL_TENSORS)
    }


@contextmanager
def saving_small(ways: Sequence[str]) -> Iterator[Acts]:
    import torch.distributed.checkpoint as dcp

    from farstep import checkpoint

    with folder("tmpfs") as path:
        state = small_tensors()

        def by_dcp() -> Stored:
            dcp.save(state, checkpoint_id=path / "dcp")
            return Stored(path / "dcp")

        def by_farstep() -> Stored:
            checkpoint.save(state, path / "farstep")
            return Stored(path / "farstep")

        known: dict[str, Act] = {"DCP": by_dcp, "farstep": by_farstep}
        yield {way: _afresh(known[way], path) for way in ways}


def reading_small(opening: bool) -> Case:
    """All of them, or only what says which there are."""

    @contextmanager
    def case(ways: Sequence[str]) -> Iterator[Acts]:
        import torch.distributed.checkpoint as dcp

        from farstep import checkpoint

        with folder("tmpfs") as path:
            state = small_tensors()
            dcp.save(state, checkpoint_id=path / "dcp")
            checkpoint.save(state, path / "farstep")
            known: dict[str, Act] = (
                {
                    "DCP": lambda: dcp.FileSystemReader(path / "dcp").read_metadata(),
                    "farstep": lambda: _opened(path / "farstep"),
                }
                if opening
                else {
                    "DCP": lambda: dcp.load(state, checkpoint_id=path / "dcp"),
                    "farstep": lambda: checkpoint.load(state, path / "farstep"),
                }
            )
            yield {way: known[way] for way in ways}

    return case


@contextmanager
def many_boxes(ways: Sequence[str]) -> Iterator[Acts]:
    """A million boxes on one rank, as a thousand tensors of a thousand rows each."""
    from farstep import checkpoint
    from farstep.state import Box, Shards, Spread

    count = 1000
    with folder("tmpfs") as path:
        boxes = [Box((row, 0), (1, SMALL_NUMEL)) for row in range(count)]
        spread = Spread.of((count, SMALL_NUMEL), torch.float32, {0: boxes})
        whole = {f"w{i}": torch.full((count, SMALL_NUMEL), float(i)) for i in range(count)}
        state = {name: Shards(spread, each.split(1)) for name, each in whole.items()}

        def save() -> Stored:
            checkpoint.save(state, path)
            return Stored(path)

        save()
        known: dict[str, Act] = {
            BOXES_SAVED: save,
            BOXES_OPENED: lambda: _opened(path),
            BOXES_LOADED: lambda: checkpoint.load(state, path),
            BOXES_WHOLE: lambda: checkpoint.load(whole, path),
        }
        yield {way: known[way] for way in ways}


def _opened(path: Path) -> None:
    from farstep.checkpoint.sources import source_of
    from farstep.checkpoint.storage import storage_of

    source_of(storage_of(path, None), True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def _write(path: Path, tensors: Any) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            file.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(file.fileno())


def _read(path: Path, tensors: Any) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in tensors:
            file.readinto(memoryview(tensor.numpy()).cast("B"))


CASES: dict[str, Case] = {
    **{
        f"{act}-{size.replace(' ', '')}-{place}": make(size, place)
        for act, make in (("save", saving), ("load", loading))
        for size in SIZES
        for place in PLACES
    },
    **{f"stall-{place}": stalling("1 GB", place) for place in PLACES},
    **{f"reshard-{place}": resharding("1 GB", place, False) for place in PLACES},
    **{f"whole-{place}": resharding("1 GB", place, True) for place in PLACES},
    "small-save": saving_small,
    "small-open": reading_small(True),
    "small-load": reading_small(False),
    "boxes": many_boxes,
}
