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


class BatchMismatchError(TypeError):
    """A batch does not fit the signature of the model's forward."""


class EngineConfigError(ValueError):
    """A configuration of DeepSpeed that has unknown keys, or contradicts the run."""


class BackendNotInstalledError(ImportError):
    """The library behind a backend is not installed, or cannot serve this device."""


class NonFiniteGradientError(RuntimeError):
    """A gradient holds an infinity or NaN, and the run is to end there."""


class ReplacedParameterError(RuntimeError):
    """A model's parameters are not those that were prepared: what is new would be trained by nothing."""
