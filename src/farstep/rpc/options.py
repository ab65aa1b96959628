"""How an agent behaves: one frozen dataclass, every field documented once, here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from farstep.errors import InsecureTransport

__all__ = ["DEFAULT_RPC_TIMEOUT_S", "UNSET_RPC_TIMEOUT", "RpcOptions"]

DEFAULT_RPC_TIMEOUT_S = 60.0
UNSET_RPC_TIMEOUT = -1.0
"""Torch's way to say 'the default timeout'. A timeout of 0 means no deadline."""

MIN_SECRET_CHARS = 16
DeviceMap = dict[torch.device, torch.device]


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Options of one agent. Torch's `TensorPipeRpcBackendOptions` maps onto it by `from_torch`."""

    init_method: str = "env://"
    """Where workers meet: `env://`, `tcp://host:port` or `file:///path`."""

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_S
    """Default deadline of a call in seconds; 0 means none."""

    init_timeout_s: float | None = None
    """How long init_rpc waits for the others; None means `rpc_timeout`."""

    num_worker_threads: int = 16
    """How many functions may run at once for each depth of nesting; threads start only when needed."""

    max_threads: int = 512
    """Bound of all threads that run functions for peers, however deep calls are nested. One peer takes a third at most."""

    max_calls_per_peer: int = 16_384
    """So many calls to one peer may be unanswered; a further one waits for its turn. The same on all workers."""

    max_bytes_per_peer: int = 256 << 20
    """So many bytes of calls to one peer may be unanswered, beside one call of any size and without what is in shared memory;
    a quarter of it is how much a peer may leave unread before its calls wait. The same on all workers."""

    transport: str = "auto"
    """`auto`: unix sockets on one host, TCP as well once a secret is set. `unix` or `tcp`: only that."""

    secret: str | None = field(default=None, repr=False)
    """Shared secret that TCP peers prove to hold. Default: the environment's FARSTEP_SECRET."""

    host: str | None = None
    """Address that the TCP listener binds and announces. Default: FARSTEP_HOST, else found by itself."""

    port: int = 0
    """Port of the TCP listener; 0 takes a free one."""

    tls_cert: str | None = None
    """PEM file of this worker's certificate. With `tls_key` and `tls_ca`, workers also check each other's certificates on TCP.
    Default: a self-signed one, made at the start; TCP is always encrypted, and the secret says who is there."""

    tls_key: str | None = field(default=None, repr=False)
    """PEM file of the key of `tls_cert`."""

    tls_ca: str | None = None
    """PEM file of the authority that every worker's certificate must be signed by."""

    dangerously_unencrypted_tcp: bool = False
    """TCP without TLS, for a network that nobody else can reach, such as the wires of one machine. Whoever is on the path reads
    everything that is sent, parameters and data included; they still cannot call, change or inject. The same on all workers."""

    trusted: tuple[str, ...] | None = None
    """Modules (`myapp`, with all below it) or single names (`torch.add`) that peers may call and that may be
    unpickled. None allows whatever can be imported, as torch does, once a peer is authenticated."""

    heartbeat_s: float = 10.0
    """A TCP peer whose host says nothing for this long is lost. The kernel answers for a peer that is busy or stopped: it is never lost by it."""

    max_frame_bytes: int = 16 << 30
    """A message that claims to be longer is refused before memory is taken."""

    shared_memory_bytes: int = 2 << 30
    """Bound of the memory this worker lends to peers on its host for large tensors, and of what it maps of each of theirs; 0
    sends all by socket. The same on all workers."""

    shared_memory_min_bytes: int = 128 << 10
    """Tensors smaller than this always go by socket."""

    spin_s: float = 5e-4
    """How long a thread that waits for a message looks for it before it sleeps, where that has paid of late. It makes
    calls that follow each other closely several times faster; 0 for machines with more workers than cores."""

    switch_interval_s: float | None = None
    """When set, sys.setswitchinterval for the life of the agent: 1e-4 cuts a call's latency from about 5 ms to
    0.3 ms while a Python thread of this process is busy, at a small cost to that thread."""

    device_maps: Mapping[str, DeviceMap] = field(default_factory=dict)
    """Callee name -> {this worker's device: callee's device}. Tensors that are not on the CPU need an entry."""

    devices: tuple[torch.device, ...] = ()
    """Local devices the agent uses; accepted for torch's sake."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "unix", "tcp"):
            raise ValueError(f"transport must be 'auto', 'unix' or 'tcp', not {self.transport!r}")
        if isinstance(self.trusted, str):
            raise TypeError(f"trusted is a tuple of names, such as ({self.trusted!r},), not a string")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, not {self.num_worker_threads}")
        for name, least in (("max_threads", 16), ("max_calls_per_peer", 1), ("max_bytes_per_peer", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be 0 (no deadline) or positive, not {self.rpc_timeout}")
        if self.heartbeat_s <= 0:
            raise ValueError(f"heartbeat_s must be positive, not {self.heartbeat_s}")
        if type(self.dangerously_unencrypted_tcp) is not bool:
            raise TypeError(
                f"dangerously_unencrypted_tcp is True or False, not {self.dangerously_unencrypted_tcp!r}"
            )
        if self.secret is not None and not isinstance(self.secret, str):
            raise TypeError(f"secret is a string, not {type(self.secret).__name__}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 (any free one) to 65535, not {self.port}")
        for name, least in (("max_frame_bytes", 256), ("shared_memory_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        given = [bool(f) for f in (self.tls_cert, self.tls_key, self.tls_ca)]
        if any(given) and not all(given):
            raise ValueError("TLS needs all three of tls_cert, tls_key and tls_ca")
        if any(given) and self.dangerously_unencrypted_tcp:
            raise ValueError(
                "dangerously_unencrypted_tcp and certificates (tls_cert) contradict each other: give one of them"
            )
        secret = self.shared_secret
        if secret and len(secret) < MIN_SECRET_CHARS:
            raise ValueError(
                f"the shared secret must have at least {MIN_SECRET_CHARS} characters; {HOW_TO_SET_A_SECRET}"
            )
        if self.transport == "tcp" and not secret:
            raise InsecureTransport(f"TCP needs a shared secret: {HOW_TO_SET_A_SECRET}")

    @property
    def shared_secret(self) -> str | None:
        return self.secret or os.environ.get("FARSTEP_SECRET") or None

    @property
    def init_deadline_s(self) -> float:
        return (
            self.init_timeout_s
            if self.init_timeout_s is not None
            else (self.rpc_timeout or DEFAULT_RPC_TIMEOUT_S)
        )

    @classmethod
    def from_torch(cls, options: Any) -> RpcOptions:
        """The same wishes, from torch's option object or from our own stand-in for it."""
        if isinstance(options, cls):
            return options
        names = {f.name for f in fields(cls)}
        given = {n: getattr(options, n) for n in names if hasattr(options, n)}
        given["devices"] = tuple(given.get("devices", ()))
        return cls(**given)


HOW_TO_SET_A_SECRET = (
    "set the environment variable FARSTEP_SECRET (or RpcOptions.secret) to the same value on every worker, "
    'for example from `python -c "import secrets; print(secrets.token_hex(32))"`'
)
