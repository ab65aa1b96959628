"""A model and its optimizer, saved under one parallelism and loaded under another, go on as if nothing had happened."""

import shutil

import pytest
import torch
import torch.distributed as dist
from state import training, uneven
from state.training import Trained, reference
from torch import nn

from farstep import checkpoint
from farstep.checkpoint import PerRank
from farstep.errors import CheckpointError, CheckpointMismatch


def close(found, wanted, what):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def state_of(each: Trained) -> dict:
    return {"model": each.model, "optim": each.optimizer, "steps": 2}


_fleet: dict[type[uneven.Trained], list[uneven.Trained]] = {}
"""Of each kind two, which are kept between the steps."""


def taken_one_step(step: int, kind: type[uneven.Trained], before: str | None, after: str) -> None:
    """Load what the kind before has saved, train, and save."""
    fleet = _fleet.setdefault(kind, [kind(seed=1), kind(seed=2)])
    each = kind(seed=0) if before is None else fleet[step % 2]
    if before is not None:
        if step % 3 == 0:
            each.optimizer = each.optimized()  # in other steps it has the state of an earlier visit
        state = {"model": each.model, "optim": each.optimizer, "steps": 0}
        assert not checkpoint.load(state, before)
        assert state["steps"] == step
    each.train(step)
    checkpoint.save({"model": each.model, "optim": each.optimizer, "steps": step + 1}, after)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kind_to_every_kind(two, four, tmp_path):
    """One training goes from kind to kind and between two and four ranks. One process that has
    trained through loads what each has saved.
    """
    reference = uneven.Reference()
    plain = uneven.Plain(seed=3)
    kinds = [uneven.KINDS[number] for number in uneven.tour(len(uneven.KINDS))]
    before = None
    for step, kind in enumerate(kinds):
        after = f"{tmp_path}/{step}"
        (four if step % 8 > 5 else two).run(taken_one_step, step, kind, before, after)
        what = f"step {step}, {kinds[step - 1].__name__} -> {kind.__name__}:"
        parameters, wanted = reference.after(step + 1)
        checkpoint.load({"model": plain.model, "optim": plain.optimizer, "steps": 0}, after)
        close(plain.whole(), parameters, what)
        state = plain.optimizer.state
        found = {name: state[p] for name, p in plain.model.named_parameters() if state.get(p)}
        assert set(found) == set(wanted), what
        for name, values in wanted.items():
            close(found[name], values, f"{what} {name}")
        if before is not None:
            shutil.rmtree(before)
        before = after


@pytest.mark.parametrize("kind", ["Fsdp2", "Flat", "TwoD", "Zero"])
def test_the_whole_state_as_plain_tensors(two, tmp_path, kind):
    two.run(saved_one, kind, str(tmp_path))
    parameters, state = reference(2)
    found = checkpoint.read(tmp_path)
    close(found["model"], parameters, kind)
    for name, values in state.items():
        close(found["optim"]["state"][name], values, name)


def saved_one(kind: str, path: str) -> None:
    each = getattr(training, kind)()
    each.train(2)
    checkpoint.save(state_of(each), path)


def test_replicas_are_written_once(two, four, tmp_path):
    for ranks, path in ((two, tmp_path / "two"), (four, tmp_path / "four")):
        ranks.run(saved_one, "Ddp", str(path))
        whole = sum(t.nbytes for t in tensors_in(checkpoint.read(path)))
        stored = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        assert whole <= stored < whole + 10_000  # headers


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


# -- what ranks have for themselves -----------------------------------------------------------------------


def with_a_generator(path: str, load: bool):
    rank = dist.get_rank()
    torch.manual_seed(rank if not load else 100)
    state = {"rng": PerRank(torch.get_rng_state()), "place": PerRank({"epoch": 1, "row": 10 * rank})}
    if load:
        state = {"rng": PerRank(torch.get_rng_state()), "place": PerRank({"epoch": 0, "row": 0})}
        checkpoint.load(state, path)
        assert state["place"].value == {"epoch": 1, "row": 10 * rank}
        torch.set_rng_state(state["rng"].value)
        return torch.rand(3).tolist()
    checkpoint.save(state, path)
    return torch.rand(3).tolist()


def test_a_value_of_each_rank(two, tmp_path):
    drawn = two.run(with_a_generator, str(tmp_path), False)
    assert drawn[0] != drawn[1]
    assert two.run(with_a_generator, str(tmp_path), True) == drawn


def unlike_values(path: str, kind: str) -> str:
    rank = dist.get_rank()
    state = {
        "number": {"a": {"seed": rank}},
        "tensor": {"a": {"seed": torch.full((3,), float(rank))}},
        "shape": {"a": {"seed": torch.zeros(rank + 1)}},
        "kind": {"a": {"seed": [1, 2] if rank else "text"}},
    }[kind]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(state, path)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["number", "tensor", "shape", "kind"])
def test_values_that_should_be_the_same_and_are_not(two, tmp_path, kind):
    for text in two.run(unlike_values, str(tmp_path), kind):
        assert "a.seed" in text
        assert "rank 0" in text
        assert "rank 1" in text
        assert "PerRank" in text
    assert list(tmp_path.iterdir()) == []


def stages(path: str, load: bool) -> None:
    """A pipeline: each rank has layers that no other has."""
    rank = dist.get_rank()
    torch.manual_seed(rank + 10 * load)
    layer = nn.Linear(3, 3)
    state = {"model": {f"stage{rank}": layer}, "step": 7}
    if not load:
        checkpoint.save(state, path)
        return
    checkpoint.load(state, path, strict=False)
    torch.manual_seed(rank)
    assert torch.equal(layer.weight, nn.Linear(3, 3).weight)


def test_ranks_with_different_layers(two, tmp_path):
    two.run(stages, str(tmp_path), False)
    two.run(stages, str(tmp_path), True)
    assert set(checkpoint.read(tmp_path)["model"]) == {"stage0", "stage1"}


# -- one rank that cannot ---------------------------------------------------------------------------------


def one_fails(path: str, load: bool) -> str:
    rank = dist.get_rank()
    if load:
        state = {"x": torch.zeros(4 if rank else 5)}
        act = checkpoint.load
    else:
        state = {"x": torch.zeros(4), "y": object() if rank else 3}
        act = checkpoint.save
    with pytest.raises(CheckpointError) as caught:
        act(state, path)
    return str(caught.value)


def test_all_raise_if_one_rank_cannot_save(two, tmp_path):
    one, other = two.run(one_fails, str(tmp_path), False)
    assert "rank 1" in one
    assert "'y'" in one
    assert "'y'" in other
    assert list(tmp_path.iterdir()) == []


def test_all_raise_if_one_rank_cannot_load(two, tmp_path):
    checkpoint.save({"x": torch.zeros(4)}, tmp_path)
    one, other = two.run(one_fails, str(tmp_path), True)
    assert "'x'" in one
    assert "because of rank 0" in other


def by_itself(path: str) -> None:
    if dist.get_rank() == 0:
        checkpoint.save({"x": torch.arange(4.0)}, path, no_dist=True)
        found = {"x": torch.zeros(4)}
        checkpoint.load(found, path, no_dist=True)
        assert found["x"].tolist() == [0, 1, 2, 3]


def test_one_rank_saves_by_itself(two, tmp_path):
    two.run(by_itself, str(tmp_path))


def trained_by_itself(path: str, kind: str) -> None:
    each = getattr(training, kind)(seed=dist.get_rank())
    each.train(1)
    if dist.get_rank() == 1:  # the other one is not here
        state = state_of(each)
        checkpoint.save(state, f"{path}/a", no_dist=True)
        checkpoint.async_save(state, f"{path}/b", no_dist=True).wait(30)
        checkpoint.CheckpointManager(f"{path}/many", no_dist=True).save(state, 7)
        for name in ("a", "b", "many/step_000000007"):
            other = training.Plain(seed=5)
            checkpoint.load(state_of(other), f"{path}/{name}", no_dist=True)
            close(other.whole(), each.whole(), name)
            for mine, theirs in zip(each.keys(), other.keys(), strict=True):
                close(other.optimizer.state[theirs], each.optimizer.state[mine], name)


@pytest.mark.parametrize("kind", ["Plain", "Ddp"])
def test_one_rank_saves_its_training_by_itself(two, tmp_path, kind):
    two.run(trained_by_itself, str(tmp_path), kind)


def part_of_a_whole(path: str) -> None:
    each = training.Fsdp2()
    each.train(1)
    checkpoint.save(state_of(each), f"{path}/whole")
    for state in ({"model": each.model}, state_of(each)):
        with pytest.raises(
            CheckpointError, match="no_dist=True a process saves and loads what it has all of"
        ):
            checkpoint.save(state, f"{path}/part", no_dist=True)
        with pytest.raises(
            CheckpointError, match="no_dist=True a process saves and loads what it has all of"
        ):
            checkpoint.load(state, f"{path}/whole", strict=False, no_dist=True)


def test_a_part_of_a_sharded_model_is_not_saved_or_loaded_alone(two, tmp_path):
    two.run(part_of_a_whole, str(tmp_path))
    assert not (tmp_path / "part").exists()


def test_renamed_parameters_of_a_sharded_model(two, tmp_path):
    two.run(saved_one, "Fsdp2", str(tmp_path))
    two.run(loaded_renamed, str(tmp_path))


def loaded_renamed(path: str) -> None:
    each = training.Flat(seed=1)
    names = {"model.first": "model.second", "model.second": "model.first"}
    with pytest.raises(CheckpointMismatch):
        checkpoint.load(state_of(each), path, rename=names)
