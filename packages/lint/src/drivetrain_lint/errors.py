"""The errors of the linter's own arguments; a finding in a script is no error."""

from drivetrain_config import ConfigError


class LintArgumentError(ConfigError):
    """An argument that cannot be honoured; the message gives the closest argument, or the possible ones."""
