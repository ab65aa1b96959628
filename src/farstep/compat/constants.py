"""torch.distributed.rpc.constants."""

from datetime import timedelta

from farstep.rpc import options

__all__: list[str] = []

DEFAULT_RPC_TIMEOUT_SEC: float = options.DEFAULT_RPC_TIMEOUT_S
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = options.UNSET_RPC_TIMEOUT
