"""The public names: what the package lists is there, is documented, and nothing else is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import farstep
import farstep.rpc

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(farstep.__path__, "farstep.")
    if not module.name.endswith("__main__") and ".site" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_what_it_lists_and_says_what_it_is_for(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module says in its docstring what it is for"
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.__all__ lists {public}, which is not there"


def test_the_list_of_rpc_is_sorted_and_complete() -> None:
    listed = farstep.rpc.__all__
    assert listed == sorted(listed)
    public = {
        name
        for name, value in vars(farstep.rpc).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
    }
    assert public == set(listed) - {"functions"}


def test_every_function_of_rpc_is_in_the_guide() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "rpc.md").read_text()
    functions = [n for n in farstep.rpc.__all__ if inspect.isfunction(getattr(farstep.rpc, n))]
    torch_only = {"is_available"}
    missing = [name for name in functions if name not in guide and name not in torch_only]
    assert not missing, f"docs/rpc.md says nothing of {', '.join(missing)}"


def test_every_error_has_its_place_in_the_drawn_tree() -> None:
    from farstep import errors

    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        assert name in drawn, f"{name} is not in the tree at the top of errors.py"
