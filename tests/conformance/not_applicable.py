"""The tests of PyTorch's suite that farstep does not run, each with the reason.

A test stands here only if what it checks is something that farstep does not set out to do.  A
test that merely uses such a thing as a tool (the profiler to see whether a call was made, say)
runs.
"""

from __future__ import annotations

#: What torch does and farstep does not: TorchScript, the legacy profiler, TensorPipe's counters, waiting for ever.
NOT_APPLICABLE = {
    # TorchScript functions and modules
    "RpcTest.test_stress_heavy_rpc_torchscript": "calls a TorchScript function",
    "RpcTest.test_wait_all_exit_early_script_function": "calls a TorchScript function",
    "RpcTest.test_async_record_function_cbs_jit_call": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_async_rpc": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_async_rpc_single_threaded": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_sync_rpc": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_sync_rpc_single_threaded": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_remote_rpc": "profiles a call of a TorchScript function",
    "RpcTest.test_profiler_with_script_remote_rpc_single_threaded": "profiles a call of a TorchScript function",
    "RemoteModuleTest.test_forward_async_script": "runs a RemoteModule compiled by TorchScript",
    "RemoteModuleTest.test_forward_sync_script": "runs a RemoteModule compiled by TorchScript",
    "RemoteModuleTest.test_remote_module_py_pickle_not_supported_script": "pickles a RemoteModule compiled by TorchScript",
    "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire_script_not_supported": "sends a RemoteModule compiled by TorchScript",
    "DistAutogradTest.test_backward_simple_script_call": "calls a TorchScript function",
    "DistAutogradTest.test_trainer_ps_torchscript_functions": "calls a TorchScript function",
    "TensorPipeAgentDistAutogradTest.test_backward_simple_script_call_sparse": "calls a TorchScript function",
    # The legacy profiler's remote events
    "DistAutogradTest.test_dist_autograd_profiling": "wants torch's engine threads in the legacy profile",
    "RpcTest.test_profiler_rpc_record_shapes": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_rpc_memory": "wants the callee's memory events in the caller's legacy profile",
    "RpcTest.test_profiler_export_trace": "wants the callee's events in the caller's legacy trace",
    "RpcTest.test_profiler_rpc_key_names": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_remote_events_profiled": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_remote_events_profiled_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_rpc_profiling_async_function": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_rpc_profiling_async_function_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_rpc_profiling_remote_record_function": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_autograd_context": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_autograd_context_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_sync_rpc_udf": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_sync_rpc_udf_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_sync_rpc_builtin": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_sync_rpc_builtin_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_async_rpc_udf": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_async_rpc_udf_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_async_rpc_builtin": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_async_rpc_builtin_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_remote_udf": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_remote_udf_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_remote_builtin": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_profiler_with_remote_builtin_single_threaded": "wants the callee's events in the caller's legacy profile",
    "RpcTest.test_server_process_global_profiler": "drives the legacy profiler of a whole remote process",
    # What torch cannot do
    "DistAutogradTest.test_backward_unused_send_function": "asserts that an unused output makes backward wait for ever; "
    "farstep's ends, with gradients in mode smart and with an error in mode fast",
    # TensorPipe's private counters
    "RpcTest.test_disable_gil_profiling": "wants the time that TensorPipe's C++ threads wait for the GIL; farstep has none",
}

#: What runs with its TorchScript half left out (see ``suites._leave_out_torchscript``).
PARTLY = {
    "RpcTest.test_rref_get_future": "a Python function stands in for the TorchScript one",
    "RemoteModuleTest.test_forward_async": "only the Python module, not the TorchScript one",
    "RemoteModuleTest.test_forward_sync": "only the Python module, not the TorchScript one",
}

LEFT_OUT = NOT_APPLICABLE
