"""The test classes of PyTorch's suite, bound to the implementation under test.

Imported once, by a host, before it forks any worker.  ``FARSTEP_CONFORMANCE_IMPL`` names a module
whose ``install()`` puts the implementation in torch's place; ``torch`` leaves torch's own there,
which is the control run: what fails there says nothing about farstep.

The classes stand at module level under their own names since some tests send bound methods of
their test case to other workers, and pickle has to find the class again.
"""

from __future__ import annotations

import importlib
import os
import warnings

warnings.simplefilter("ignore")
IMPL = os.environ.get("FARSTEP_CONFORMANCE_IMPL", "farstep.compat")
if IMPL != "torch":
    importlib.import_module(IMPL).install()

import torch  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp_test  # noqa: E402
from torch.testing._internal.distributed.nn.api import remote_module_test  # noqa: E402
from torch.testing._internal.distributed.rpc import dist_autograd_test, dist_optimizer_test, rpc_test  # noqa: E402
from torch.testing._internal.distributed.rpc.examples import (  # noqa: E402
    parameter_server_test,
    reinforcement_learning_rpc_test,
)
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import (  # noqa: E402
    RpcAgentTestFixture,
)

torch.set_num_threads(1)


class Worker(RpcAgentTestFixture, TestCase):
    """One worker of one test.  The host sets ``rank`` and ``file_name`` in the forked process."""

    rank: int
    file_name: str

    @property
    def rpc_backend(self):
        return rpc.backend_registry.BackendType["TENSORPIPE"]

    @property
    def rpc_backend_options(self):
        return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

    def get_shutdown_error_regex(self):
        # A peer may be met at any stage of going away.
        return ".+"

    def get_timeout_error_regex(self):
        return "RPC ran for more than"


class RpcTest(rpc_test.RpcTest, Worker): ...


class DistAutogradTest(dist_autograd_test.DistAutogradTest, Worker): ...


class TensorPipeAgentDistAutogradTest(dist_autograd_test.TensorPipeAgentDistAutogradTest, Worker): ...


class DistOptimizerTest(dist_optimizer_test.DistOptimizerTest, Worker): ...


class DdpUnderDistAutogradTest(ddp_test.DdpUnderDistAutogradTest, Worker): ...


class DdpComparisonTest(ddp_test.DdpComparisonTest, Worker): ...


class RemoteModuleTest(remote_module_test.RemoteModuleTest, Worker): ...


class ThreeWorkersRemoteModuleTest(remote_module_test.ThreeWorkersRemoteModuleTest, Worker): ...


class ParameterServerTest(parameter_server_test.ParameterServerTest, Worker): ...


class ReinforcementLearningRpcTest(reinforcement_learning_rpc_test.ReinforcementLearningRpcTest, Worker): ...


def _keep_reducers() -> None:
    """Keep every DistributedDataParallel until the process ends.

    Torch's destructor of one joins gloo's threads while it holds the GIL, and such a thread may be about to take the GIL to
    let a tensor go: then both wait for ever. It happens without farstep, too (once in some dozens of runs).
    """
    kept = []
    init = ddp_test.DistributedDataParallel.__init__

    def keeping_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        kept.append(self)

    ddp_test.DistributedDataParallel.__init__ = keeping_init


def _leave_out_torchscript() -> None:
    """Take the TorchScript half out of the tests listed in ``not_applicable.PARTLY``."""
    rpc_test.my_script_func = rpc_test.identity

    create = remote_module_test.CommonRemoteModuleTest._create_remote_module_iter
    python_only = [remote_module_test.ModuleCreationMode.MODULE_CTOR]

    def create_python_modules(remote_device, modes=None):
        return create(remote_device, python_only if modes is None else modes)

    for case in (RemoteModuleTest, ThreeWorkersRemoteModuleTest):
        case._create_remote_module_iter = staticmethod(create_python_modules)


_keep_reducers()
if IMPL != "torch":
    _leave_out_torchscript()
