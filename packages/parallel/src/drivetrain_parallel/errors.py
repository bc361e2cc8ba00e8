"""The errors of drivetrain-parallel."""


class ParallelPlanError(ValueError):
    """A plan does not fit the model, the number of ranks, or what the package can divide."""
