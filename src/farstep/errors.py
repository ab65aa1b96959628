"""Every exception farstep raises.

    RuntimeError
    └── FarstepError
        ├── AutogradError            gradients across workers
        │   ├── UnknownContext       a context that was never opened here, or has been released
        │   ├── BackwardError        something failed on some worker during backward
        │   └── BackwardTimeout      nothing was heard of a backward pass for too long  (also TimeoutError)
        ├── CheckpointError          saving and loading
        │   ├── NoCheckpoint         there is none, or none that is whole      (also FileNotFoundError)
        │   ├── DamagedCheckpoint    its bytes are not those that were saved
        │   ├── CheckpointMismatch   it has other names, shapes or dtypes than wanted (also ValueError)
        │   ├── CheckpointBusy       another process is saving there
        │   └── StorageFailed        the disk is full, read-only, gone or broken (also OSError)
        ├── OptimError               optimizers across workers
        │   ├── StepError            some owners of parameters did not step
        │   └── StateMismatch        a state that does not fit the optimizer (also ValueError)
        ├── StateError               named tensors spread over ranks
        │   ├── LayoutError          a gap, an overlap, or shapes or dtypes that do not fit (also ValueError)
        │   └── ExchangeError        a copy between ranks did not come about
        │       └── RankLost         a rank died, stayed away, or called something else (also
        │                            CheckpointError, OptimError)
        └── RpcError
            ├── NotInitialized       a call before init_rpc or after shutdown
            ├── UnknownWorker        no worker of that name or rank          (also ValueError)
            ├── WorkerLost           it died, left, or cannot be reached     (also ConnectionError)
            ├── RpcTimeout           no answer in time                       (also TimeoutError)
            │   ├── InitTimeout      not everyone arrived at init_rpc
            │   └── ShutdownTimeout  not everyone arrived at shutdown
            ├── RemoteError          the callee raised what cannot be rebuilt here
            ├── PayloadError         something cannot be pickled or unpickled
            │   └── Untrusted        `trusted` does not allow a name
            ├── ProtocolError        bytes that are not a frame, or a frame over the limits
            ├── AuthenticationError  a peer that does not hold the secret, or has another uid
            ├── InsecureTransport    TCP asked for without a shared secret
            ├── DuplicateName        two workers with one name or one rank
            └── RRefError            a remote reference used where it cannot be

All are RuntimeErrors because that is what code written for torch.distributed.rpc catches.
An exception raised by a remote function arrives as its own class where that class can be
imported and rebuilt, with the remote traceback as its cause (see `RemoteTraceback`).
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "AutogradError",
    "BackwardError",
    "BackwardTimeout",
    "CheckpointBusy",
    "CheckpointError",
    "CheckpointMismatch",
    "DamagedCheckpoint",
    "DuplicateName",
    "ExchangeError",
    "FarstepError",
    "InitTimeout",
    "InsecureTransport",
    "LayoutError",
    "NoCheckpoint",
    "NotInitialized",
    "OptimError",
    "PayloadError",
    "ProtocolError",
    "RRefError",
    "RankLost",
    "RemoteError",
    "RemoteTraceback",
    "RpcError",
    "RpcTimeout",
    "ShutdownTimeout",
    "StateError",
    "StateMismatch",
    "StepError",
    "StorageFailed",
    "UnknownContext",
    "UnknownWorker",
    "Untrusted",
    "WorkerLost",
]


class FarstepError(RuntimeError):
    """The root: catch this to catch everything farstep itself raises."""


class AutogradError(FarstepError):
    """Something is wrong with a context or a backward pass."""


class UnknownContext(AutogradError):
    """There is no autograd context of that id on this worker. `context_id` is the id."""

    def __init__(self, context_id: int, what: str = "backward and get_gradients belong") -> None:
        super().__init__(
            f"Could not find autograd context with id: {context_id}. It was never opened, or has been released; {what} inside "
            f"`with context() as context_id`"
        )
        self.context_id = context_id
        self.what = what

    def __reduce__(self) -> tuple[type[UnknownContext], tuple[int, str]]:
        return type(self), (self.context_id, self.what)


class BackwardError(AutogradError):
    """The backward pass failed on a worker: a hook, a function's backward, the engine. The cause has the traceback."""

    remote_worker: str
    remote_traceback: str

    def __init__(self, worker: str, rank: int, text: str) -> None:
        super().__init__(f"Error on Node {rank}: {text} (worker {worker!r})")
        self.worker = worker
        self.rank = rank
        self.text = text

    def __reduce__(self) -> tuple[type[BackwardError], tuple[str, int, str]]:
        return type(self), (self.worker, self.rank, self.text)


class BackwardTimeout(AutogradError, TimeoutError):
    """Nothing was heard of a backward pass for longer than its timeout. The message says who was to report."""


class CheckpointError(FarstepError):
    """A checkpoint could not be saved or loaded."""


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place, or only what a save left that did not finish."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, too short, or has other bytes than were saved. The message names the file and the tensor.

    Tensors that were being loaded may be partly written: load another checkpoint before they are used.
    """

    is_partly_loaded = False
    """Whether it was found while the state was being filled, so that what it has may be partly overwritten."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint has other names, shapes or dtypes than the state that is to be loaded. Nothing has been changed."""


class CheckpointBusy(CheckpointError):
    """Another process is saving into the same directory."""


class StorageFailed(CheckpointError, OSError):
    """What keeps a checkpoint did not do as it was told: it is full, read-only, gone or broken. `errno` says which, on the rank where it happened."""


class OptimError(FarstepError):
    """Something is wrong with an optimizer across workers."""


class StepError(OptimError):
    """Some owners did not step. `failed` says who and why, worker name -> exception; `stepped` names those who did."""

    def __init__(self, text: str, failed: dict[str, BaseException], stepped: list[str]) -> None:
        super().__init__(text)
        self.text = text
        self.failed = failed
        self.stepped = stepped

    def __reduce__(self) -> tuple[type[StepError], tuple[str, dict[str, BaseException], list[str]]]:
        return type(self), (self.text, self.failed, self.stepped)


class StateMismatch(OptimError, ValueError):
    """A state that is to be loaded has other names, shapes, options or groups than the optimizer. Nothing has been changed."""


class StateError(FarstepError):
    """Something is wrong with tensors that are spread over ranks."""

    kind: str = ""
    """Where it tells of another rank's error: the name of its class."""


class LayoutError(StateError, ValueError):
    """Boxes that leave a gap or overlap, or shapes, dtypes or names that do not fit. The message names the tensor and the box.

    Nothing has been copied.
    """


class ExchangeError(StateError):
    """A copy between ranks did not come about: a rank is lost, late, or has another plan. Targets may be partly written."""


class RankLost(ExchangeError, CheckpointError, OptimError):
    """A rank died, did not call what the others of its process group called, or called something else.

    `operation` is what this rank called, and `ranks` are those that caused it, numbered as in the whole job. On a
    rank that came too late, that is the rank itself.
    The process group cannot be used any more.
    """

    operation: str = ""
    ranks: tuple[int, ...] = ()


class RpcError(FarstepError):
    """Something went wrong in a call between workers."""


class NotInitialized(RpcError):
    """There is no agent in this process: before init_rpc, or after shutdown."""


class UnknownWorker(RpcError, ValueError):
    """The group has no worker of that name or rank."""


class WorkerLost(RpcError, ConnectionError):
    """A worker died, left the group, or cannot be reached. `worker` names it."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} is lost: {reason}")
        self.worker = worker
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerLost], tuple[str, str]]:
        return type(self), (self.worker, self.reason)


class RpcTimeout(RpcError, TimeoutError):
    """A call had no answer before its deadline. The callee may still be running it."""


class InitTimeout(RpcTimeout):
    """Not every worker arrived at init_rpc in time. The message lists who did and who did not."""


class ShutdownTimeout(RpcTimeout):
    """At shutdown a worker was missing, or a call was not answered in time. This worker has shut down all the same."""


class RemoteError(RpcError):
    """The callee raised an exception whose class cannot be imported or rebuilt here."""

    def __init__(self, worker: str, type_name: str, message: str) -> None:
        super().__init__(f"{type_name} on worker {worker!r}: {message}")
        self.worker = worker
        self.type_name = type_name
        self.message = message

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str, str]]:
        return type(self), (self.worker, self.type_name, self.message)


class RemoteTraceback(Exception):
    """Carries the remote traceback as the `__cause__` of a rebuilt exception, so that it is printed with it."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}\n{self.text}"


class PayloadError(RpcError):
    """An argument or a result cannot be pickled, or cannot be unpickled where it arrived."""


class Untrusted(PayloadError):
    """A peer named a function or class that the `trusted` option does not allow."""


class ProtocolError(RpcError):
    """A peer sent bytes that are not a frame, or a frame beyond the limits."""


class AuthenticationError(RpcError):
    """A peer could not prove that it belongs to the group."""


class InsecureTransport(RpcError):
    """TCP was asked for, or is needed, and no shared secret is set."""


class DuplicateName(RpcError):
    """Two workers claim the same name or the same rank."""


class RRefError(RpcError):
    """A remote reference was used where it cannot be, such as local_value on a user."""
