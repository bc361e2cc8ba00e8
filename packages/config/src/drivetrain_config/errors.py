"""What can go wrong when settings are read."""


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or outside its range; the message names field, value and source."""
