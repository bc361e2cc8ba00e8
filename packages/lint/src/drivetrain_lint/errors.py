"""The errors of the linter's own arguments; what it finds in scripts is no error."""

from drivetrain_config import ConfigError


class LintArgumentError(ConfigError):
    """An argument that cannot be honoured; the message gives the closest one or what is possible."""
