"""The error of a DeepSpeed configuration."""


class EngineConfigError(ValueError):
    """A DeepSpeed configuration has unknown keys or contradicts the run."""
