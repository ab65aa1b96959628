"""torch.distributed.rpc.constants."""

from datetime import timedelta

from farstep.rpc import options

__all__: list[str] = []

_DEFAULT_RPC_TIMEOUT_SEC: float = options.DEFAULT_RPC_TIMEOUT_S
_DEFAULT_INIT_METHOD: str = "env://"
_DEFAULT_NUM_WORKER_THREADS: int = 16
_UNSET_RPC_TIMEOUT: float = options.UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT
