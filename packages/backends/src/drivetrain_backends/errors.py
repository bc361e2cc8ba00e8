"""What can go wrong between a model, its optimizer and the backend that trains them."""


class PairingError(ValueError):
    """Of a model, its optimizer, scheduler and loss, one was prepared without the other that it needs."""


class UnknownBackendError(ValueError):
    """No backend of that name is installed or given."""


class AccumulationError(RuntimeError):
    """Two ways to normalise the loss, or steps in an order that would give wrong gradients."""


class UnreducedGradientError(RuntimeError):
    """A gradient would be stepped on that ranks have not averaged, so that their weights would drift apart."""


class UnshardedParameterError(RuntimeError):
    """A parameter was created or re-assigned after its model was sharded, so that nothing trains or saves it."""


class OptimizerStateError(ValueError):
    """An optimizer keeps state that its backend cannot divide among ranks, so that no checkpoint could hold it."""


class SchedulerError(RuntimeError):
    """A scheduler counts something else than the steps of its optimizer."""


class BatchMismatchError(TypeError):
    """A batch does not fit the signature of the model's forward."""


class EngineConfigError(ValueError):
    """A configuration of DeepSpeed that has unknown keys, or contradicts the run."""


class BackendNotInstalledError(ImportError):
    """The library behind a backend is not installed, or cannot serve this device."""


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or NaN, and the run is to end there."""


class DriftedReplicasError(RuntimeError):
    """The weights of a model that is replicated are not the same on all ranks."""


class ReplacedParameterError(RuntimeError):
    """A model's parameters are not those that were prepared: what is new would be trained by nothing."""


class SecondDerivativeError(RuntimeError):
    """A backward with `create_graph=True` under a backend that lets go of parameters in backward."""
