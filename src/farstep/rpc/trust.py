"""Which functions and classes a peer may name.

`None` allows whatever can be imported: an authenticated peer of the group is trusted, as in torch.
A tuple narrows it to modules (`myapp` and all below it) or single names (`torch.add`). Beside these
only what any message needs is allowed: plain containers, the built-in exceptions, and how this
package rebuilds tensors and references.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch

from farstep import errors
from farstep.errors import Untrusted

__all__ = ["CALLABLE_OWN", "OWN", "PLAIN", "PLAIN_BUILTINS", "Trust"]

PLAIN_BUILTINS: Final = frozenset(
    {
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "object",
        "range",
        "set",
    }
    | {"slice", "str", "tuple", "NoneType"}
    | {name for name, x in vars(builtins).items() if isinstance(x, type) and issubclass(x, Exception)}
)
PLAIN: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
        ("datetime", "timedelta"),
        ("torch", "Size"),
        ("torch", "device"),
    }
    | {("torch", str(x).removeprefix("torch.")) for x in vars(torch).values() if isinstance(x, torch.dtype)}
)
CALLABLE_OWN: Final = frozenset(
    {("farstep.errors", name) for name in errors.__all__}
    | {
        ("farstep.rpc.payload", f"_{name}")
        for name in ("tensor", "method", "named", "with_grad", "sparse_coo", "sparse_compressed")
    }
    | {
        ("farstep.rpc.payload", "ref_slot"),
        ("farstep.rpc.membership", "WorkerInfo"),
        ("farstep.rpc.remote_module", "_rebuild_remote_module"),
    }
)
"""How this package rebuilds what it sends: a body may call these."""
OWN: Final = (
    CALLABLE_OWN
    | {
        ("farstep.rpc.gather", "_missing_here"),
        ("farstep.autograd.api", "_populate_here"),
        ("farstep.autograd.picture", "_describe_here"),
    }
    | {
        ("farstep.optim.calls", f"_{name}")
        for name in (
            *("create", "add_group", "remove_group", "step", "norms", "scale", "clamp"),
            *("state", "state_rrefs", "states_of", "prepare", "abandon", "commit"),
        )
    }
    | {("farstep.optim.parameters", "_named_parameters")}
    | {
        ("farstep.rpc.rref", f"_{name}")
        for name in ("call_method", "call_async_method", "rref_typeof_on_owner", "backward_here")
    }
    | {
        ("farstep.rpc.remote_module", f"_{name}")
        for name in ("create_module", "run_forward", "parameter_rrefs", "set_training")
    }
    | {("farstep.rpc.remote_module", name) for name in ("forward", "forward_async")}
)
"""What this package itself sends. Each looks at its arguments before it calls anything they name."""


def _imported(module: str) -> Any:
    """Import a module, or wait for a thread that is importing it; its packages first.

    Python locks a module before its package. While another thread imports that package, and through it the module, the two would wait for
    each other, which Python ends by handing out a module that is half made.
    """
    package = module.rpartition(".")[0]
    if package:
        _imported(package)
    return importlib.import_module(module)


class Trust:
    """Finds what a message names, if it may."""

    def __init__(self, trusted: Iterable[str] | None, worker: str = "this worker") -> None:
        self._worker = worker
        self._entries = None if trusted is None else tuple(trusted)
        self.is_open = trusted is None
        """Whether a peer may name whatever can be imported."""

    def find(self, module: str, qualname: str) -> Any:
        """The object of that name. AttributeError or ImportError where there is none."""
        if not self.is_open and not self._may_look(module, qualname):
            raise self._refusal(module, qualname)
        found: Any = sys.modules.get(module)
        if found is None or getattr(getattr(found, "__spec__", None), "_initializing", False):
            found = _imported(module)
        parts = qualname.split(".")
        for i, part in enumerate(parts):
            found = getattr(found, part)
            # On the way to a name there are classes only: `myapp.os.system` and `myapp.f.__globals__` are not of myapp.
            if (
                not self.is_open
                and i < len(parts) - 1
                and not (isinstance(found, type) and self.is_at_home(found))
            ):
                raise self._refusal(module, qualname)
        if not self.is_open and not self._may_have(module, qualname, found):
            raise self._refusal(module, qualname)
        return found

    def check_method(self, owner: Any, name: str) -> None:
        """A method is allowed where the class that it is asked of is. Nothing of it has been touched yet."""
        if self.is_open:
            return
        kind = owner if isinstance(owner, type) else type(owner)
        if (name.startswith("_") and name != "__call__") or not self.is_at_home(kind):
            raise self._refusal(kind.__module__, f"{kind.__qualname__}.{name}")

    def check_callable(self, found: Any) -> None:
        """What a message brings to be called must be something that it may name."""
        if not self.is_open and not (isinstance(found, type | FunctionType) and self.is_at_home(found)):
            raise self._refusal(
                type(found).__module__, getattr(found, "__qualname__", type(found).__qualname__)
            )

    def check_called(self, function: Any) -> None:
        """What any message may name, such as `list`, is there to be sent, not to be called by a peer's call.

        `list(range(2_000_000_000))` is a small message.
        """
        if self.is_open or not isinstance(function, type):
            return
        home, name = function.__module__, function.__qualname__
        is_common = (home, name) in PLAIN or (home == "builtins" and name in PLAIN_BUILTINS)
        if is_common and f"{home}.{name}" not in (self._entries or ()):
            raise self._refusal(home, name)

    def _entry_covers(self, module: str, qualname: str) -> bool:
        full = f"{module}.{qualname}"
        return any(full == entry or full.startswith(entry + ".") for entry in self._entries or ())

    def _may_look(self, module: str, qualname: str) -> bool:
        if (module, qualname) in PLAIN or (module, qualname) in OWN:
            return True
        if module == "builtins":
            return qualname in PLAIN_BUILTINS or f"builtins.{qualname}" in (self._entries or ())
        hidden = any(part.startswith("_") for part in qualname.split("."))
        return self._entry_covers(module, qualname) and (
            not hidden or f"{module}.{qualname}" in (self._entries or ())
        )

    def is_at_home(self, found: Any) -> bool:
        """Whether the object was defined where the entries say, not merely imported there."""
        home, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        return isinstance(home, str) and isinstance(name, str) and self._entry_covers(home, name)

    def _may_have(self, module: str, qualname: str, found: Any) -> bool:
        if (module, qualname) in PLAIN or (module, qualname) in OWN or module == "builtins":
            return True
        if f"{module}.{qualname}" in (self._entries or ()):
            return True
        return isinstance(found, type | FunctionType | BuiltinFunctionType) and self.is_at_home(found)

    def _refusal(self, module: str, qualname: str) -> Untrusted:
        trusted = ", ".join(self._entries or ()) or "nothing"
        refusal = f"{module}.{qualname} is not among what {self._worker} trusts ({trusted}); "
        if (module, qualname) == ("builtins", "getattr"):
            return Untrusted(
                refusal + "a method of a tensor or of another built-in class is called so: call a function "
                "such as torch.add instead"
            )
        return Untrusted(
            refusal + "add the name, or the module in which it is defined, to RpcOptions.trusted to allow it"
        )
