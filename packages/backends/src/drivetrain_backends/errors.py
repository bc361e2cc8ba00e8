"""The errors of pairing a model with its optimizer and of training it through a backend."""


class PairingError(ValueError):
    """A model, optimizer, scheduler or loss is used without the prepared object that it needs."""


class UnknownBackendError(ValueError):
    """No installed or registered backend has this name."""


class AccumulationError(RuntimeError):
    """The loss is normalised in two ways, or steps come in an order that gives wrong gradients."""


class UnreducedGradientError(RuntimeError):
    """A gradient to step on is not averaged over ranks, so that their weights would drift apart."""


class UnshardedParameterError(RuntimeError):
    """A parameter was created or reassigned after its model was sharded, so that it is neither trained nor saved."""


class OptimizerStateError(ValueError):
    """An optimizer keeps state that its backend can neither divide among ranks nor save in a checkpoint."""


class SchedulerError(RuntimeError):
    """A scheduler counts something other than the steps of its optimizer."""


class BatchMismatchError(TypeError):
    """A batch does not fit the signature of the model's forward."""


class BackendNotInstalledError(ImportError):
    """The library behind a backend is not installed, or does not support this device."""


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or NaN, and the settings end the run in this case."""


class DriftedReplicasError(RuntimeError):
    """The weights of a replicated model differ between ranks."""


class ReplacedParameterError(RuntimeError):
    """A model's parameters were replaced after `prepare`, and the new parameters would not be trained."""


class SecondDerivativeError(RuntimeError):
    """A backward with `create_graph=True` ran under a backend that releases parameters during backward."""
