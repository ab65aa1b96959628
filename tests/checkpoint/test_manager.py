"""A training's checkpoints: which are kept, which is newest, and where a training goes on."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import Ranks
from support.workers import Worker

from farstep.checkpoint import CheckpointManager, LocalDisk, RemoteStorage, async_save, read, save
from farstep.checkpoint.manifest import MANIFEST
from farstep.checkpoint.retention import Retention
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, NoCheckpoint


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((100,), step), "step": step}


def damage(path: Path, step: int) -> None:
    (data,) = (path / f"step_{step:09d}").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run"


def test_what_is_kept(place: str) -> None:
    manager = CheckpointManager(place, keep_last=2, keep_best=1, best="min", keep_every=30)
    assert manager.steps() == []
    assert manager.newest() is manager.best() is manager.resume(state_of(0)) is None
    for step, metric in (
        (10, 5.0),
        (20, 1.0),
        (30, 3.0),
        (40, 2.0),
        (50, 4.0),
        (60, float("nan")),
        (70, None),
    ):
        manager.save(state_of(step), step, metric)
    assert manager.steps() == [20, 30, 60, 70]
    assert (manager.newest(), manager.best(), manager.metric(20)) == (70, 20, 1.0)
    # Another manager, in another process, knows as much.
    again = CheckpointManager(place, keep_last=1, keep_best=2, best="max")
    again.async_save(state_of(80), 80, metric=7.0).wait(30)
    assert again.steps() == [30, 80]
    state = state_of(0)
    assert again.resume(state) == 80
    assert state["step"] == 80
    assert (state["a"] == 80).all()
    assert again.resume(state, step=30) == 30
    assert read(again.path(30))["step"] == 30


def test_all_are_kept_unless_asked(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in range(5):
        manager.save(state_of(step), step)
    assert manager.steps() == [0, 1, 2, 3, 4]
    manager.delete(4)
    assert manager.steps() == [0, 1, 2, 3]
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 4: it has step 0, 1, 2, 3"):
        manager.delete(4)


@given(
    metrics=st.dictionaries(st.integers(0, 50), st.none() | st.floats(), min_size=1),
    keep_last=st.none() | st.integers(1, 5),
    keep_best=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
    best=st.sampled_from(["min", "max"]),
)
@settings(deadline=None)
def test_each_is_kept_for_a_reason(
    metrics: Any, keep_last: Any, keep_best: Any, keep_every: Any, best: Any
) -> None:
    rule = Retention(keep_last, keep_best, keep_every, best)
    kept = rule.kept(metrics)
    if keep_last is keep_best is keep_every is None:
        assert kept == set(metrics)
        return
    known = {step: value for step, value in metrics.items() if value is not None and value == value}
    for step in metrics:
        newer = sum(other > step for other in metrics)
        better = sum((v < known[step]) if best == "min" else (v > known[step]) for v in known.values()) if step in known else None  # fmt: skip
        if newer < (keep_last or 1) or (keep_every and step % keep_every == 0):
            assert step in kept
        elif better is None or better >= (keep_best or 0):
            assert step not in kept
    assert len(kept & known.keys()) >= min(keep_best or 0, len(known))


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3, 4):
        manager.save(state_of(step), step)
    damage(tmp_path, 3)
    (tmp_path / "step_000000004" / MANIFEST).write_bytes(b"{}")
    state = state_of(0)
    with pytest.warns(RuntimeWarning, match=r"step 2 has been loaded, and not step 4, 3, which cannot be"):
        step = manager.resume(state)
    assert step == 2
    assert step is not None
    assert list(step.skipped) == [4, 3]
    assert "'a'" in step.skipped[3]
    assert (state["a"] == 2).all()
    assert manager.newest() == 2
    assert CheckpointManager(tmp_path).newest() == 3  # whose content newest does not compare
    # Saved anew they are whole.
    manager.save(state_of(4), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.resume(state) == 4


def test_none_that_is_whole(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(state_of(1), 1)
    damage(tmp_path, 1)
    with pytest.raises(DamagedCheckpoint, match="none of its checkpoints is whole"):
        manager.resume(state_of(0))


def test_a_state_that_does_not_fit_is_no_reason_to_go_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(state_of(1), 1)
    manager.save({"a": torch.ones(5), "step": 2}, 2)
    with pytest.raises(CheckpointMismatch):
        manager.resume(state_of(0))
    state = state_of(0)
    found = manager.resume(state, strict=False)
    assert found is not None
    assert found.report.reshaped == ["a"]


def test_the_last_whole_one_stays(tmp_path: Path) -> None:
    """A save that fails removes nothing, and one that is damaged does not count."""

    class Full(LocalDisk):
        def create(self, name: str, nbytes: int) -> Any:
            raise OSError(28, "No space left on device")

    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(state_of(1), 1)
    full = CheckpointManager(Full(tmp_path), keep_last=1)
    with pytest.raises(CheckpointError, match="No space left"):
        full.save(state_of(2), 2)
    handle = full.async_save(state_of(2), 2)
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait(30)
    assert manager.steps() == [1]
    (tmp_path / "step_000000009").mkdir()
    (tmp_path / "step_000000009" / MANIFEST).write_bytes(b"{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # resume does not take step 9, so there is nothing to tell
        manager.save(state_of(2), 2)
    assert manager.newest() == 2
    assert (tmp_path / "step_000000009" / MANIFEST).exists()


def test_one_that_was_found_damaged_counts_for_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=1)
    for step in (10, 20):
        manager.save(state_of(step), step, metric=-float(step))
    damage(tmp_path, 20)
    with pytest.warns(RuntimeWarning, match="step 10 has been loaded"):
        assert manager.resume(state_of(0)) == 10
    assert manager.best() == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (11, 13, 15):
            manager.save(state_of(step), step)
    assert manager.steps() == [10, 13, 15, 20]  # the best that is whole, the last two, and the one to look at
    manager.save(state_of(20), 20, metric=-20.0)
    assert manager.steps() == [15, 20]


def test_nothing_of_a_damaged_one_is_mixed_into_another(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save({"a": torch.ones(4)}, 1)
    manager.save({"a": torch.full((4,), 2.0), "new": torch.full((4,), 2.0), "z": torch.full((4,), 2.0)}, 2)
    damage(tmp_path, 2)

    def state() -> dict[str, Any]:
        return {"a": torch.zeros(4), "new": torch.zeros(4), "z": torch.zeros(4)}

    with pytest.raises(DamagedCheckpoint, match=r"'new'.*overwritten from step 2.*resume with step=1"):
        manager.resume(state(), strict=False)
    anew = state()
    assert manager.resume(anew, step=1, strict=False) == 1
    assert (anew["new"] == 0).all()
    # One of which nothing was read does no harm.
    (tmp_path / "step_000000002" / MANIFEST).write_bytes(b"{}")
    with pytest.warns(RuntimeWarning, match="not step 2"):
        assert manager.resume(state(), strict=False) == 1


def test_directories_that_a_cut_removal_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / "step_000000003").mkdir(parents=True)
    CheckpointManager(tmp_path).save(state_of(5), 5)
    assert [each.name for each in tmp_path.iterdir()] == ["step_000000005"]


def test_a_step_that_is_removed_while_it_is_listed(tmp_path: Path, monkeypatch: Any) -> None:
    """Another process looks for the newest while the training's own manager lets an old one go."""
    manager = CheckpointManager(tmp_path)
    manager.save({"a": 1}, 1)
    manager.save({"a": 2}, 2)
    old, scandir = tmp_path / "step_000000001", os.scandir

    def scan(path: Any) -> Any:
        if path == old:
            shutil.rmtree(old)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert manager.steps() == [2]


def test_a_step_before_the_newest_is_not_removed_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(state_of(50), 50)
    with pytest.warns(RuntimeWarning, match=r"step 50 already: that is what resume takes. delete\(50\)"):
        manager.save(state_of(20), 20)
    assert manager.steps() == [20, 50]


def test_what_is_not_its_own_stays(tmp_path: Path) -> None:
    strange = ["step_7", "step_0000000007", "step_000000007.bak", "other", "step_000000003"]
    for name in strange:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2, 4):
        manager.save(state_of(step), step)
        (tmp_path / f"step_{step:09d}" / "mine.txt").write_text("mine")
    assert manager.steps() == [4]
    for name in [*strange, "step_000000001", "step_000000002", "step_000000004"]:
        assert (tmp_path / name / "mine.txt").read_text() == "mine"
    assert (tmp_path / "notes.txt").exists()
    assert [each.name for each in (tmp_path / "step_000000001").iterdir()] == ["mine.txt"]


def _stops_halfway(path: str) -> None:
    import os

    class Dying(LocalDisk):
        def replace(self, name: str, data: bytes) -> None:
            os._exit(9)

    async_save(state_of(5), Dying(path)).wait()


def test_what_a_killed_save_left_is_cleaned_up(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.save(state_of(1), 1)
    worker = Worker("dying", tmp_path / "log")
    worker.start(_stops_halfway, str(tmp_path / "step_000000005"))
    worker._process.join(30)
    worker.close()
    left = tmp_path / "step_000000005"
    assert list(left.iterdir())
    assert manager.steps() == [1]
    assert manager.resume(state_of(0)) == 1
    manager.save(state_of(2), 2)
    assert not left.exists()
    assert manager.steps() == [1, 2]


def test_metrics_by_name(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=1, best="max", monitor="accuracy")
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.1)):
        manager.save(
            state_of(step), step, {"loss": 1.0, "accuracy": torch.tensor(accuracy, dtype=torch.float64)}
        )
    assert manager.steps() == [2, 3]
    assert (manager.best(), manager.metric(2)) == (2, 0.9)
    with pytest.raises(ValueError, match="no 'accuracy'"):
        manager.save(state_of(4), 4, {"loss": 1.0})
    with pytest.raises(ValueError, match="monitor="):
        CheckpointManager(tmp_path).save(state_of(4), 4, {"loss": 1.0})


@pytest.mark.parametrize(
    "wrong", [{"keep_last": 0}, {"keep_best": -1}, {"keep_every": 1.5}, {"best": "least"}]
)
def test_rules_that_make_no_sense(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CheckpointManager(tmp_path, **wrong)


@pytest.mark.parametrize("step", [-1, 1.5, True, "1"])
def test_steps_that_are_none(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="whole number from 0 on"):
        CheckpointManager(tmp_path).save(state_of(1), step)


def test_old_ones_that_cannot_be_removed_are_told_of(tmp_path: Path) -> None:
    class Stubborn(LocalDisk):
        def delete(self, names: Any) -> None:
            if MANIFEST in (names := list(names)):
                raise OSError(1, "Operation not permitted")
            super().delete(names)

    manager = CheckpointManager(Stubborn(tmp_path), keep_last=1)
    manager.save(state_of(1), 1)
    with pytest.warns(RuntimeWarning, match="has been saved, but older checkpoints could not be removed"):
        manager.save(state_of(2), 2)
    assert CheckpointManager(tmp_path).resume(state_of(0)) == 2


def test_a_checkpoint_that_save_made_counts_too(tmp_path: Path) -> None:
    save(state_of(3), tmp_path / "step_000000003")
    manager = CheckpointManager(tmp_path)
    assert (manager.resume(state_of(0)), manager.metric(3)) == (3, None)
    assert isinstance(CheckpointManager("memory://there").path(1), RemoteStorage)


# -- ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _train(path: str) -> list[Any]:
    rank = dist.get_rank()
    manager = CheckpointManager(path, keep_last=2, keep_best=1)
    state = {"shared": torch.zeros(10), f"own{rank}": torch.zeros(1000)}
    found: list[Any] = [manager.resume(state)]
    for step in range(1, 6):
        for tensor in state.values():
            tensor.fill_(step)
        manager.async_save(state, step, metric=abs(step - 2.0))
    found.append(manager.resume(state))  # waits for the last one
    found.append(manager.steps())
    return found


def _go_on(path: str) -> tuple[Any, Any, float]:
    rank = dist.get_rank()
    state = {"shared": torch.zeros(10), f"own{rank}": torch.zeros(1000)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = CheckpointManager(path).resume(state)
    assert found is not None
    assert told
    return int(found), dict(found.skipped), float(state[f"own{rank}"][0])


def test_all_ranks_alike(pair: Ranks, tmp_path: Path) -> None:
    for found in pair.run(_train, str(tmp_path)):
        assert found == [None, 5, [2, 4, 5]]
    # What only one rank reads is damaged: both go back.
    data = next((tmp_path / "step_000000005").glob("*.1.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for rank, (step, skipped, value) in enumerate(pair.run(_go_on, str(tmp_path))):
        assert (step, value) == (4, 4.0)
        assert "own1" in skipped[5], rank


def _steps_after_each_save(path: str) -> list[list[int]]:
    class Slow(LocalDisk):
        def delete(self, names: Any) -> None:
            names = list(names)
            if MANIFEST in names:
                threading.Event().wait(0.1)  # so that a rank that does not wait is seen
            super().delete(names)

    manager = CheckpointManager(Slow(path), keep_last=1)
    found = []
    for step in range(3):
        manager.save({"a": step}, step)
        found.append(manager.steps())
    return found


def test_all_ranks_see_the_same_steps_after_a_save(pair: Ranks, tmp_path: Path) -> None:
    assert pair.run(_steps_after_each_save, str(tmp_path)) == [[[0], [1], [2]]] * 2


def _different_metrics(path: str) -> tuple[list[str], float | None]:
    manager = CheckpointManager(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        manager.save({"a": 1}, 1, metric=dist.get_rank() + 0.5)
        manager.save({"a": 1}, 2, metric=0.5 if dist.get_rank() == 0 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((RuntimeWarning, CheckpointError), match="different metrics"):
            manager.save({"a": 1}, 3, metric=dist.get_rank() + 0.5)
    return [str(each.message) for each in told], manager.metric(1)


def test_the_first_ranks_metric_counts(pair: Ranks, tmp_path: Path) -> None:
    (first, metric), (other, same) = pair.run(_different_metrics, str(tmp_path))
    assert (metric, same) == (0.5, 0.5)
    assert ["from 0.5 to 1.5. That of the first rank counts, 0.5" in each for each in first] == [True]
    assert not other


def _different_steps(path: str) -> None:
    with pytest.raises(CheckpointError, match="different steps"):
        CheckpointManager(path).save({"a": 1}, dist.get_rank())


def test_ranks_that_disagree(pair: Ranks, tmp_path: Path) -> None:
    pair.run(_different_steps, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_metric_that_is_none_and_a_step_that_is_not_there(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="metric is a number, or a mapping of numbers, not 'x'"):
        manager.save({"w": torch.ones(2)}, 1, metric="x")
    manager.save({"w": torch.ones(2)}, 1, metric=torch.ones((), requires_grad=True) * 2)
    assert manager.metric(1) == 2.0
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 77: it has step 1"):
        manager.resume({"w": torch.ones(2)}, step=77)
