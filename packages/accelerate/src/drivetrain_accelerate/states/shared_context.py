"""The context that the functions of Accelerate's interface share, which take none as an argument."""

from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_state import Context


def current_context() -> Context:
    """Return the context of this process; the first call connects the ranks, and is made on all of them."""
    return PartialState().context
