"""The error raised while settings are read."""


class ConfigError(ValueError):
    """An error for a setting that is unknown, mistyped or out of range; the message names field, value and source."""
