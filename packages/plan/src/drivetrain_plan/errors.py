"""The error of this package."""


class PlanError(ValueError):
    """An error of a plan that is asked for: it says what was given, what is allowed and what to do."""
