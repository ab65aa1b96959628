"""torch.distributed.rpc.server_process_global_profiler."""

from farstep.compat.unsupported import PROFILER, unsupported, unsupported_class

__all__: list[str] = []

_server_process_global_profile = unsupported_class("rpc._server_process_global_profile", PROFILER)
_enable_server_process_global_profiler = unsupported("_enable_server_process_global_profiler", PROFILER)
_disable_server_process_global_profiler = unsupported("_disable_server_process_global_profiler", PROFILER)
