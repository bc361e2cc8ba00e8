"""The errors of the linter's arguments; a finding in a script is no error."""

from drivetrain_config import ConfigError


class LintArgumentError(ConfigError):
    """An invalid argument; the message gives the closest valid argument or all valid arguments."""
