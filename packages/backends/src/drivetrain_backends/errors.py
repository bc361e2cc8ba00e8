"""The errors of pairing a model with its optimizer and of training it through a backend."""


class PairingError(ValueError):
    """A model, optimizer, scheduler or loss was prepared without another of them that it needs."""


class UnknownBackendError(ValueError):
    """No installed or registered backend has this name."""


class AccumulationError(RuntimeError):
    """The loss is normalised in two ways, or steps come in an order that gives wrong gradients."""


class UnreducedGradientError(RuntimeError):
    """A gradient to step on is not averaged over ranks, so that their weights would drift apart."""


class UnshardedParameterError(RuntimeError):
    """A parameter was created or reassigned after its model was sharded, so that it is neither trained nor saved."""


class OptimizerStateError(ValueError):
    """An optimizer's state cannot be divided among ranks by its backend, nor saved in a checkpoint."""


class SchedulerError(RuntimeError):
    """A scheduler counts something other than the steps of its optimizer."""


class BatchMismatchError(TypeError):
    """A batch does not fit the signature of the model's forward."""


class EngineConfigError(ValueError):
    """A DeepSpeed configuration has unknown keys or contradicts the run."""


class BackendNotInstalledError(ImportError):
    """The library behind a backend is not installed, or does not support this device."""


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or NaN, and the run is configured to end there."""


class DriftedReplicasError(RuntimeError):
    """The weights of a replicated model differ between ranks."""


class ReplacedParameterError(RuntimeError):
    """A model's parameters are no longer the prepared ones, and the new ones would not be trained."""


class SecondDerivativeError(RuntimeError):
    """A backward with `create_graph=True` ran under a backend that releases parameters during backward."""
