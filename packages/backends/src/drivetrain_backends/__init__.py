"""Training backends behind one protocol, and the contract test that each of them passes.

A `Backend` prepares models together with their optimizers and schedulers, and returns a `Prepared` for each model,
through which the model is trained. `SingleBackend` trains on one device, `DDPBackend` replicates the model on every
rank, `FSDPBackend` shards it: each is a `ComposedBackend` with a `Strategy`. Third-party backends are found through
the entry point group `drivetrain.backends`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_backends.composed.backend import ComposedBackend as ComposedBackend
    from drivetrain_backends.composed.single_device import SingleBackend as SingleBackend
    from drivetrain_backends.composed.state_layout import StateLayout as StateLayout
    from drivetrain_backends.composed.strategy import ModelTransform as ModelTransform
    from drivetrain_backends.composed.strategy import StepGuard as StepGuard
    from drivetrain_backends.composed.strategy import Strategy as Strategy
    from drivetrain_backends.composed.transforms import on_one_device as on_one_device
    from drivetrain_backends.ddp.backend import DDPBackend as DDPBackend
    from drivetrain_backends.errors import AccumulationError as AccumulationError
    from drivetrain_backends.errors import BackendNotInstalledError as BackendNotInstalledError
    from drivetrain_backends.errors import BatchMismatchError as BatchMismatchError
    from drivetrain_backends.errors import DriftedReplicasError as DriftedReplicasError
    from drivetrain_backends.errors import NonFiniteGradientError as NonFiniteGradientError
    from drivetrain_backends.errors import OptimizerStateError as OptimizerStateError
    from drivetrain_backends.errors import PairingError as PairingError
    from drivetrain_backends.errors import ReplacedParameterError as ReplacedParameterError
    from drivetrain_backends.errors import SchedulerError as SchedulerError
    from drivetrain_backends.errors import SecondDerivativeError as SecondDerivativeError
    from drivetrain_backends.errors import UnknownBackendError as UnknownBackendError
    from drivetrain_backends.errors import UnreducedGradientError as UnreducedGradientError
    from drivetrain_backends.errors import UnshardedParameterError as UnshardedParameterError
    from drivetrain_backends.fsdp.backend import FSDPBackend as FSDPBackend
    from drivetrain_backends.gradients.accumulation import AccumulationWindow as AccumulationWindow
    from drivetrain_backends.gradients.reducer import BackwardOptions as BackwardOptions
    from drivetrain_backends.gradients.reducer import ParameterGradients as ParameterGradients
    from drivetrain_backends.modules.autocast_forward import restore_forward as restore_forward
    from drivetrain_backends.modules.compile import strip_wrapper_prefix as strip_wrapper_prefix
    from drivetrain_backends.modules.compile import unwrap_compiled as unwrap_compiled
    from drivetrain_backends.modules.packed_weights import is_packed as is_packed
    from drivetrain_backends.modules.packed_weights import packed_entries as packed_entries
    from drivetrain_backends.optim.optimizer import PreparedOptimizer as PreparedOptimizer
    from drivetrain_backends.optim.optimizer import StepResult as StepResult
    from drivetrain_backends.optim.scheduler import PreparedScheduler as PreparedScheduler
    from drivetrain_backends.optim.scheduler import Scheduler as Scheduler
    from drivetrain_backends.protocol import AutoValue as AutoValue
    from drivetrain_backends.protocol import Backend as Backend
    from drivetrain_backends.protocol import Prepared as Prepared
    from drivetrain_backends.protocol import SupportsLocalSteps as SupportsLocalSteps
    from drivetrain_backends.protocol import SupportsManualSteps as SupportsManualSteps
    from drivetrain_backends.protocol import SupportsReplicas as SupportsReplicas
    from drivetrain_backends.protocol import SupportsWaitWatch as SupportsWaitWatch
    from drivetrain_backends.protocol import SupportsWeights as SupportsWeights
    from drivetrain_backends.registry import BackendRegistry as BackendRegistry
    from drivetrain_backends.registry import register_backend as register_backend
    from drivetrain_backends.settings import DDPSettings as DDPSettings
    from drivetrain_backends.settings import FSDPSettings as FSDPSettings
    from drivetrain_backends.state_dict.full_tensors import full_model as full_model
    from drivetrain_backends.state_dict.full_tensors import full_state_dict as full_state_dict
    from drivetrain_backends.state_dict.full_tensors import full_tensor as full_tensor
    from drivetrain_backends.state_dict.full_tensors import iter_full_tensors as iter_full_tensors
    from drivetrain_backends.state_dict.full_tensors import load_full_state_dict as load_full_state_dict
    from drivetrain_backends.testing.contract import BackendContract as BackendContract
    from drivetrain_backends.weight_average import WeightAverage as WeightAverage

# Module -> its public names.
_NAMES = {
    "composed.backend": "ComposedBackend",
    "composed.single_device": "SingleBackend",
    "composed.state_layout": "StateLayout",
    "composed.strategy": "ModelTransform StepGuard Strategy",
    "composed.transforms": "on_one_device",
    "ddp.backend": "DDPBackend",
    "errors": "AccumulationError BackendNotInstalledError BatchMismatchError DriftedReplicasError "
    "NonFiniteGradientError OptimizerStateError PairingError ReplacedParameterError SchedulerError "
    "SecondDerivativeError UnknownBackendError UnreducedGradientError UnshardedParameterError",
    "fsdp.backend": "FSDPBackend",
    "gradients.accumulation": "AccumulationWindow",
    "gradients.reducer": "BackwardOptions ParameterGradients",
    "modules.autocast_forward": "restore_forward",
    "modules.compile": "strip_wrapper_prefix unwrap_compiled",
    "modules.packed_weights": "is_packed packed_entries",
    "optim.optimizer": "PreparedOptimizer StepResult",
    "optim.scheduler": "PreparedScheduler Scheduler",
    "protocol": "AutoValue Backend Prepared SupportsLocalSteps SupportsManualSteps SupportsReplicas "
    "SupportsWaitWatch SupportsWeights",
    "registry": "BackendRegistry register_backend",
    "settings": "DDPSettings FSDPSettings",
    "state_dict.full_tensors": "full_model full_state_dict full_tensor iter_full_tensors load_full_state_dict",
    "testing.contract": "BackendContract",
    "weight_average": "WeightAverage",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
