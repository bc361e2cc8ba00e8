"""Check the first optimizer step for operations that user code computes in half precision."""

import warnings
from contextlib import ExitStack

from drivetrain.parts.prepared import PreparedObjects
from drivetrain_precision import HalfOperations, HalfPrecisionWarning, find_half_operations


class HalfCheck:
    """Checks the micro-batches of the first window, and warns on the main process when the window closes.

    Args:
        prepared: The prepared objects. If there is one model, modules are called by their names in the model.
        is_main: Whether this is the main process.
    """

    def __init__(self, prepared: PreparedObjects, *, is_main: bool) -> None:
        self._prepared, self._is_main = prepared, is_main
        self._found: list[HalfOperations] = []
        self._open = ExitStack()
        self._is_done = False

    def enter(self) -> None:
        """Begin to check a micro-batch, if it belongs to the first window."""
        if self._is_done:
            return
        models = self._prepared.models
        model = models[0].unwrap() if len(models) == 1 else None
        self._found.append(self._open.enter_context(find_half_operations(model, warn=False)))

    def leave(self, *, is_last: bool) -> None:
        """End the check of a micro-batch.

        Args:
            is_last: Whether the micro-batch closed the window. If true, warn of the operations that were found.
        """
        self._open.close()
        if self._is_done or not is_last:
            return
        self._is_done = True
        lines = dict.fromkeys(
            line for found in self._found if found.operations for line in str(found).splitlines()
        )
        if lines and self._is_main:
            warnings.warn("\n".join(lines), HalfPrecisionWarning, stacklevel=3)

    def finish(self) -> None:
        """Warn that nothing was checked, if the training ended without a micro-batch."""
        if self._found or not self._is_main:
            return
        warnings.warn(
            "precision.check_half: no micro-batch was checked; run the step in "
            "`with accelerator.accumulate(model):`, or in `with drivetrain_precision.find_half_operations(model):`",
            HalfPrecisionWarning,
            stacklevel=2,
        )
