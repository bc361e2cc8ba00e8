"""Wait for the other ranks."""

from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_state import barrier


def wait_for_everyone() -> None:
    """Wait until every rank has reached this call. Called on all ranks."""
    barrier(current_context())
