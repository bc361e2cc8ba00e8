"""Words about lines of a loop that do not do what they seem to, once each, with the line.

Only the first two steps of an optimizer are looked at: a later step counts its backward, and no more.
"""

import logging
from functools import partial
from inspect import currentframe
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.parts.prepared import PreparedObjects
from drivetrain_backends import AccumulationWindow, PreparedOptimizer
from drivetrain_backends.compat import BatchNorm
from drivetrain_data import BatchPlan, LoaderTracker, Shard, UnpreparedLoops

logger = logging.getLogger(__name__)
_MOST_BACKWARDS = 16  # that are looked at for what was not cleared


class LoopWords:
    """The words of the main process about its loop.

    Args:
        prepared: The prepared objects.
        window: The accumulation window.
        reading: The loaders being read.
        shard: The shard of the data that this rank reads.
        keeps_logs: Whether logged values go anywhere, or are meant not to.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        window: AccumulationWindow,
        reading: LoaderTracker,
        shard: Shard,
        *,
        keeps_logs: bool,
    ) -> None:
        self._prepared, self._window, self._reading, self._shard = prepared, window, reading, shard
        self.keeps_logs = keeps_logs
        self._said: set[str] = set()
        self._num_backwards = 0
        self._gathered: BatchPlan | None = None  # the batch of the last gather since the last backward
        # The backwards that an optimizer had seen at its last step.
        self._seen: WeakKeyDictionary[PreparedOptimizer, int] = WeakKeyDictionary()
        self._watched: WeakSet[PreparedOptimizer] = WeakSet()
        self._handles: WeakKeyDictionary[PreparedOptimizer, RemovableHandle] = WeakKeyDictionary()
        self._uncleared: WeakSet[PreparedOptimizer] = (
            WeakSet()
        )  # have stepped once, and gradients still stand

    def watch(self) -> None:
        """Look at the first steps of the optimizers that are new."""
        for optimizer in self._prepared.optimizers:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                optimizer.before_step = partial(self._before_step, ref(optimizer))
                self._handles[optimizer] = optimizer.optimizer.register_step_pre_hook(
                    _StepPast(ref(optimizer))
                )

    def begin_backward(self) -> None:
        """Look at the loop of the first loss, and at what was cleared before this one."""
        if self._window.is_probe:
            return
        if not self._num_backwards and self._shard.count > 1 and (loop := UnpreparedLoops().innermost()):
            logger.warning(
                "the model trains in the loop over %s, which is a DataLoader that was not prepared: unless its data "
                "differ by rank, each of %d data-parallel ranks trains on all of it. Pass it to prepare(), and loop "
                "over the result",
                loop, self._shard.count,
            )  # fmt: skip
        self._num_backwards += 1
        self._gathered = None
        if self._num_backwards > _MOST_BACKWARDS:
            self._uncleared.clear()
        if self._uncleared:
            for optimizer in [one for one in self._uncleared if not _has_gradients(one)]:
                self._uncleared.discard(optimizer)

    def look_at_evaluation(self) -> None:
        """Look at the mode of the models whose results are gathered, of two batches without a backward between."""
        if torch.is_grad_enabled() or (loader := self._reading.current) is None:
            return
        before, self._gathered = self._gathered, loader.current
        is_second = before is not None and before is not self._gathered
        models = [one.unwrap() for one in self._prepared.models]
        if not is_second or not all(model.training for model in models):
            return
        if kinds := {type(part).__name__ for model in models for part in model.modules() if _differs(part)}:
            self._tell(
                "%s: results are gathered from a model in training mode, in which %s computes otherwise than in "
                "evaluation: call model.eval() before the loop, and model.train() after it",
                " and ".join(sorted(kinds)),
            )

    def tell_of_lost_log(self) -> None:
        """Tell that a logged value goes nowhere."""
        self.keeps_logs = True
        self._tell(
            "%s: log() goes nowhere, since the run has no tracker: %s keeps it",
            'log_with="jsonl" with a project_dir',
        )

    def _before_step(self, of: ref[PreparedOptimizer]) -> bool:
        """Look at a step; return True after an optimizer's second."""
        if (optimizer := of()) is None or self._window.is_probe or not self._window.closing:
            return optimizer is None
        name = type(optimizer.optimizer).__name__
        if self._seen.get(optimizer, 0) == self._num_backwards and not _has_gradients(optimizer):
            self._tell("%s: %s steps without a gradient: call accelerator.backward(loss) before it", name)
        elif optimizer in self._uncleared and not optimizer.is_cleared:
            self._tell(
                "%s: %s adds the gradients of this step to those of the one before: call optimizer.zero_grad() "
                "after each step",
                name,
            )
        optimizer.is_cleared = False
        if is_second := optimizer in self._seen:
            self._uncleared.discard(optimizer)
            self._handles.pop(optimizer).remove()
        else:
            self._uncleared.add(optimizer)
        self._seen[optimizer] = self._num_backwards
        return is_second

    def _tell(self, words: str, what: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.warning(words, _line_of(_caller()), what)


class _StepPast:
    """A hook that tells once if the loop steps a user's optimizer, and not the one that `prepare` returned."""

    def __init__(self, prepared: ref[PreparedOptimizer]) -> None:
        self._prepared, self._has_told = prepared, False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Look for a step of a prepared optimizer around this one, while the run holds that."""
        if (prepared := self._prepared()) is None or prepared.is_released:
            return
        frame = currentframe()
        while frame is not None and frame.f_code is not PreparedOptimizer.step.__code__:
            frame = frame.f_back
        if frame is None and not self._has_told:
            self._has_told = True
            logger.warning(
                "%s: the loop steps the %s that was passed to prepare(), and not the one that prepare() returned: it "
                "steps in open windows too, before gradients are averaged over ranks and the loss scale is removed. "
                "Step the returned one",
                _line_of(_caller()), type(optimizer).__name__,
            )  # fmt: skip


def _has_gradients(optimizer: PreparedOptimizer) -> bool:
    """Return whether this rank holds a gradient that is not zero."""
    return any(_is_set(one.grad) for group in optimizer.param_groups for one in group["params"])


def _is_set(gradient: Any) -> bool:
    if gradient is None:
        return False
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool(local.detach().count_nonzero().item())


def _differs(module: nn.Module) -> bool:
    """Return whether a module computes otherwise in training than in evaluation."""
    return isinstance(module, BatchNorm) or (isinstance(module, nn.Dropout) and module.p > 0)


def _caller() -> FrameType | None:
    """Return the frame of the user's line."""
    frame = currentframe()
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("torch", "contextlib") or package.partition("_")[0] == "drivetrain"


def _line_of(frame: FrameType | None) -> str:
    return "the loop" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
