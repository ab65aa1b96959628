"""The rendezvous store: which one is meant, who serves it, and how it is asked.

The store is torch's own, holds no secrets and authenticates nobody: whoever reaches it can write what they like. So what it says is
bounded, and no wait for it is without a deadline.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlparse

from farstep.errors import DuplicateName, InitTimeout, RpcError
from farstep.rpc.stores import FileStore, Store, TCPStore

__all__ = ["AskedStore", "create_store"]

MAX_REASON_CHARS: Final = 2000
FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.02


def create_store(init_method: str, rank: int, world_size: int | None, timeout_s: float) -> Store:
    """The store that `init_method` names. Rank 0 serves it, where it needs a server."""
    url = urlparse(init_method)
    if url.scheme == "file" and url.path:
        return FileStore(url.path, world_size or -1)
    if url.scheme == "tcp" and url.hostname and url.port:
        host, port = url.hostname, url.port
    elif url.scheme == "env":
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as exc:
            raise ValueError(f"init method env:// needs the environment variable {exc.args[0]}") from None
    else:
        raise ValueError(f"init_method must be env://, tcp://host:port or file:///path, not {init_method!r}")
    serves = rank == 0 and not _is_served_by_torchrun(host, port)
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store = TCPStore(
            host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as exc:
        reason = str(exc).splitlines()[0]
        if serves:
            raise DuplicateName(
                f"rank 0 cannot serve the rendezvous at {host}:{port}, perhaps because another worker with rank 0, or "
                f"another job, does already ({reason})"
            ) from None
        raise InitTimeout(
            f"rank {rank} cannot reach the rendezvous at {host}:{port} within {timeout_s:g} s; rank 0 serves it, so see "
            f"that rank 0 has started and that this address is right ({reason})"
        ) from None
    store.set_timeout(timeout)
    return store


def _is_served_by_torchrun(host: str, port: int) -> bool:
    """Whether that address is torchrun's own store. A group may have another address for itself, and serves it as usual."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    theirs = os.environ.get("MASTER_ADDR", "")
    if str(port) != os.environ.get("MASTER_PORT"):
        return False
    return host == theirs or bool(_addresses(host) & _addresses(theirs))


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


class AskedStore:
    """The store; what goes wrong with it is an RpcError that says so."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._ask(self._store.get, key))

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        held = self._ask(self._store.compare_set, key, expected, desired)
        return str(held.decode(errors="replace")) if isinstance(held, bytes) else str(held)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (RuntimeError, OSError, ValueError, LookupError) as exc:
            reason = (str(exc).splitlines() or [type(exc).__name__])[0][:MAX_REASON_CHARS]
            raise RpcError(
                f"worker {self._worker!r} cannot use the rendezvous store ({function.__name__} of {str(args[0])[:80]!r}): {reason}. "
                f"Either the store is gone, or something that is not a worker of this group writes there"
            ) from exc

    def wait(self, keys: list[str], deadline: float) -> None:
        """TimeoutError where not all are there in time. Torch's own wait writes warnings whenever it is cut short."""
        pause_s = FIRST_PAUSE_S
        while not self.check(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
