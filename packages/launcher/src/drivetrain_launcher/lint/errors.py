"""The errors of the linter's own arguments; what it finds in scripts is no error."""


class LintArgumentError(ValueError):
    """A name that stands for no script or no rule; the message gives the closest one or what is possible."""
