"""Run the stages of a rank on the pieces of a batch, in the order of a schedule, among ranks that send to it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from drivetrain_parallel.stages.compat import backward_to_input, backward_to_weights
from drivetrain_parallel.stages.schedules import Action, Schedule, plan_order
from drivetrain_parallel.stages.stage_model import StageModel


class StageLinks(Protocol):
    """The way in which stages send to each other, or to themselves on one rank."""

    def send(self, tensor: Tensor, *, to: int, stage: int, tag: int) -> Callable[[], object]:
        """Begin to send what a stage has for the stage `to`; return the function that waits for it."""
        ...

    def receive(self, like: Tensor, *, source: int, stage: int, tag: int) -> Tensor:
        """Return what the stage `source` has sent to a stage, of a shape, a dtype and a device."""
        ...


class StageBackward(Protocol):
    """The function that runs the backward of a tensor, with the gradient of it if it is no loss."""

    def __call__(self, output: Tensor, gradient: Tensor | None, *, is_last: bool) -> None:
        """Run a backward; `is_last` says that this rank runs no other for the batch."""
        ...


class StageRunner:
    """The stages of a rank, and the schedule by which it trains them.

    Args:
        model: The stages of this rank.
        schedule: The order of forwards and backwards.
        links: The way to the other stages.
        num_ranks: The number of ranks that hold stages.
    """

    def __init__(self, model: StageModel, schedule: Schedule, links: StageLinks, num_ranks: int) -> None:
        self.model, self.schedule = model, schedule
        self._links, self._num_ranks = links, num_ranks

    def train(
        self,
        pieces: Sequence[Callable[[], Any]],
        root: Callable[[int, Any], Tensor],
        backward: StageBackward,
    ) -> None:
        """Run forward and backward of all pieces. Called on all ranks that hold stages.

        Args:
            pieces: For each piece, the function that calls the model, and computes the loss.
            root: A function of the number of a piece and of what its function returned, that returns the tensor of
                shape () where backward begins. It is called where the last stage is.
            backward: The function that runs the backward of a stage, or the whole of one that comes in two parts.

        Raises:
            ParallelPlanError: See `StageModel.run`.
        """
        run = _Step(self.model, self._links, pieces, root, backward)
        actions = plan_order(self.schedule, self._num_ranks, len(pieces))[self.model.rank]
        for at, action in enumerate(actions):
            said = f"{action.kind} of stage {action.stage} on micro-batch {action.piece + 1}"
            try:
                with record_function(said):  # a span in the trace of a profiler
                    run.do(action, is_last=not any(map(run.has_backward, actions[at + 1 :])))
            except Exception as error:
                error.add_note(f"in the {said} of {len(pieces)}")
                raise
        run.finish()

    def evaluate(self, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run a forward of each piece through all stages; return what the calls returned on this rank.

        Called on all ranks. What a call returned is whole where the last stage is, and absent elsewhere.
        """
        found: list[Any] = [None] * len(pieces)
        sent: list[Callable[[], object]] = []
        for stage in self.model.stages:  # the last of them is the last of all, where a rank holds that
            for piece, call in enumerate(pieces):
                receive = partial(self._links.receive, source=stage - 1, stage=stage, tag=piece)
                with torch.no_grad():
                    found[piece], output = self.model.run(stage, call, receive)
                if output is not None:
                    sent.append(self._links.send(output, to=stage + 1, stage=stage, tag=piece))
        for wait in sent:
            wait()
        return found


class _Step:
    """The work of a rank on one batch."""

    def __init__(
        self,
        model: StageModel,
        links: StageLinks,
        pieces: Sequence[Callable[[], Any]],
        root: Callable[[int, Any], Tensor],
        backward: StageBackward,
    ) -> None:
        self._model, self._links, self._pieces = model, links, pieces
        self._root, self._backward = root, backward
        self._last = model.plan.num_stages - 1
        # By stage and piece: what came from the stage before, what goes to the next, and the rest of a backward.
        self._taken: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._rests: dict[tuple[int, int], Any] = {}
        self._sent: list[Callable[[], object]] = []

    def do(self, action: Action, *, is_last: bool) -> None:
        """Do an action; `is_last` says that no other backward follows."""
        kind, stage, piece = action
        if kind == "forward":
            self._forward(stage, piece)
        elif kind == "backward":
            self._whole_backward(stage, piece, is_last=is_last)
        elif kind == "input":
            self._to_input(stage, piece)
        else:
            self._to_weights(stage, piece, is_last=is_last)

    def has_backward(self, action: Action) -> bool:
        """Return whether an action runs a backward that reduces gradients; not where all that led to it is frozen."""
        if action.kind not in ("backward", "weight"):
            return False
        output = self._outputs.get((action.stage, action.piece))
        return output is None or output.requires_grad

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for wait in self._sent:
            wait()

    def _forward(self, stage: int, piece: int) -> None:
        def receive(like: Tensor) -> Tensor:
            taken = self._receive(like, stage - 1, stage, 2 * piece)
            self._taken[stage, piece] = taken.requires_grad_()
            return taken

        found, output = self._model.run(stage, self._pieces[piece], receive)
        if output is None:
            self._outputs[stage, piece] = self._root(piece, found)
            return
        self._outputs[stage, piece] = output
        self._sent.append(self._links.send(output.detach(), to=stage + 1, stage=stage, tag=2 * piece))

    def _gradient(self, stage: int, piece: int, output: Tensor) -> Tensor | None:
        if stage == self._last:
            return None
        return self._receive(output, stage + 1, stage, 2 * piece + 1)

    def _receive(self, like: Tensor, source: int, stage: int, tag: int) -> Tensor:
        with record_function(f"wait for stage {source}"):
            return self._links.receive(like, source=source, stage=stage, tag=tag)

    def _send_back(self, stage: int, piece: int, taken: Tensor | None) -> None:
        if taken is not None:
            gradient = torch.zeros_like(taken) if taken.grad is None else taken.grad
            self._sent.append(self._links.send(gradient, to=stage - 1, stage=stage, tag=2 * piece + 1))

    def _whole_backward(self, stage: int, piece: int, *, is_last: bool) -> None:
        output, taken = self._outputs.pop((stage, piece)), self._taken.pop((stage, piece), None)
        gradient = self._gradient(stage, piece, output)
        if output.requires_grad:  # not where all that led to it is frozen
            with self._model.running(stage):  # blocks that backward computes again
                self._backward(output, gradient, is_last=is_last)
        self._send_back(stage, piece, taken)

    def _to_input(self, stage: int, piece: int) -> None:
        output, taken = self._outputs.pop((stage, piece)), self._taken.pop((stage, piece), None)
        gradient = self._gradient(stage, piece, output)
        if taken is None:  # the first stage has no other input
            self._rests[stage, piece] = output, gradient
            return
        with self._model.running(stage):
            self._rests[stage, piece] = backward_to_input(output, gradient, taken, self._model.weights(stage))
        self._send_back(stage, piece, taken)

    def _to_weights(self, stage: int, piece: int, *, is_last: bool) -> None:
        rest = self._rests.pop((stage, piece))
        with self._model.running(stage):
            if stage:
                backward_to_weights(self._model.weights(stage), rest)
            elif rest[0].requires_grad:
                self._backward(*rest, is_last=is_last)
