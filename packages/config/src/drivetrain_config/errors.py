"""The error raised while settings are read."""


class ConfigError(ValueError):
    """An error for an unknown, wrongly typed or out-of-range setting; the message names field, value and source."""
