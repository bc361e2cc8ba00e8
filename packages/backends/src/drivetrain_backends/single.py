"""Training on one device."""

from drivetrain_backends.torch_backend import TorchBackend


class SingleBackend(TorchBackend):
    """One process, one device; the model stays the object it was."""
