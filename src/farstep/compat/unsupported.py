"""Names of torch's that farstep has nothing for: they can be imported, and say what to do when they are used."""

from __future__ import annotations

from typing import Any, Final, NoReturn

__all__ = ["PROFILER", "TORCHSCRIPT", "unsupported", "unsupported_class"]

TORCHSCRIPT: Final = "it does not send TorchScript; send the Python function or module that was scripted"
PROFILER: Final = (
    "torch's legacy profiler does not follow calls to other workers; run torch.profiler.profile in the "
    "function that is called, and return its key_averages().table()"
)


def unsupported(name: str, instead: str) -> Any:
    """Make a function of torch's name that raises."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"farstep has no {name}: {instead}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def unsupported_class(name: str, instead: str) -> Any:
    """Make a class of torch's name that cannot be instantiated, nor asked for an attribute."""

    class Refusing(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"farstep has no {name}: {instead}")

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return unsupported(f"{name}.{attribute}", instead)

    return Refusing(name.rpartition(".")[2], (), {"__doc__": f"Not in farstep: {instead}."})
