"""Tensors that a checkpoint cannot keep, or fill: each is refused by an error that names its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from farstep import checkpoint
from farstep.errors import CheckpointError


class Wrapper(Tensor):
    """Has no memory; `__torch_dispatch__` does what a subclass says."""

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return type(self).__name__


class Unable(Wrapper):
    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"no {func}")


class Silent(Wrapper):
    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Passing(Wrapper):
    """Every operation works on what it wraps."""

    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Passing) else value

        found = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map(lambda each: Passing(each) if isinstance(each, Tensor) else each, found)


class Untouchable(Tensor):
    @classmethod
    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("do not touch")


class Named(Tensor):
    """A class of its own, and memory as any tensor has."""


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def freed() -> Tensor:
    made = torch.ones(3)
    made.untyped_storage().resize_(0)
    return made


ODD: dict[str, Callable[[], Tensor]] = {
    "unable": lambda: Unable(torch.ones(3)),
    "silent": lambda: Silent(torch.ones(3)),
    "passing": lambda: Passing(torch.ones(3)),
    "parameter": lambda: nn.Parameter(Passing(torch.ones(3))),
    "untouchable": lambda: torch.ones(3).as_subclass(Untouchable),
    "fake": fake,
    "freed": freed,
    "zero": lambda: torch._efficientzerotensor((3,)),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "compressed": lambda: torch.ones(3, 3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_saving_names_the_place(kind: str, save: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'app.w'.*Nothing has been saved"):
        save({"app": {"w": ODD[kind]()}}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "meta"])  # which gets memory
def test_loading_names_the_place(kind: str, tmp_path: Path) -> None:
    checkpoint.save({"app": {"w": torch.full((3,), 7.0)}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'app.w'"):
        checkpoint.load({"app": {"w": ODD[kind]()}}, tmp_path)


@pytest.mark.parametrize("kind", ["unable", "silent", "passing", "untouchable", "sparse", "meta"])
def test_as_a_models_buffer(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("odd", ODD[kind]())
    with pytest.raises(CheckpointError, match=r"'model.0.odd'"):
        checkpoint.save({"model": model}, tmp_path)


def test_a_tensor_whose_elements_share_memory_is_not_begun_with(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "w": torch.ones(3)}, tmp_path)
    state = {"a": torch.zeros(2), "w": torch.zeros(1).expand(3)}
    with pytest.raises(
        CheckpointError, match=r"'w' has elements that share memory.*Nothing has been changed"
    ):
        checkpoint.load(state, tmp_path)
    assert state["a"].tolist() == [0, 0]


def test_a_class_that_has_memory_is_kept(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.arange(3.0).as_subclass(Named)}, tmp_path)
    into = torch.zeros(3).as_subclass(Named)
    assert not checkpoint.load({"w": into}, tmp_path)
    assert into.tolist() == [0, 1, 2]
    into = torch.empty(3, device="meta").as_subclass(Named)
    assert not checkpoint.load({"w": into}, tmp_path)
    assert type(into) is Named
    assert into.tolist() == [0, 1, 2]
