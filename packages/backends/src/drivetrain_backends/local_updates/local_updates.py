"""A block in which replicas train apart, and exchange their weights every few steps.

Averages of the weights are local SGD (Stich, 2019); an outer optimizer that steps on their mean distance is DiLoCo
(Douillard et al., 2023); fragments in turn, exchanged beside the next steps, are streaming DiLoCo (2025).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.local_updates.exchange_plan import ExchangePlan, in_fragments
from drivetrain_backends.local_updates.fragment import Fragment, OuterOptimizer
from drivetrain_backends.optim.optimizer import PreparedOptimizer
from drivetrain_backends.protocol import Prepared, SupportsLocalSteps
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_precision import is_low_bit
from drivetrain_precision.optim.bf16_updates import forget_updates
from drivetrain_state import Context, gather_object

logger = logging.getLogger(__name__)


class LocalUpdates:
    """The exchanges of a model whose replicas step on their own gradients inside `with`.

    Made on all ranks, when the model and its optimizers are prepared. Without a prepared optimizer no step counts,
    and the loop calls `exchange`. The replicas are those of the mesh's axis `data`; ranks that compute one sample
    together go on talking. Inside the block replicas differ, but for the moment after `exchange_all`, which the end
    of the block calls, and each save.

    Args:
        prepared: The prepared model; the steps of its last optimizer count.
        context: The ranks of this run.
        plan: The steps after which weights are exchanged.
        outer: A function from parameters to the optimizer that steps on the replicas' mean distance, such as
            `partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`; None averages the weights.

    Attributes:
        num_steps: The number of inner steps so far.
        is_open: Whether the block is entered, so that replicas may differ.

    Raises:
        ValueError: The mesh has no replicas that can train apart, or the mean of an optimizer's states is none.
        RuntimeError: The backend, or a setting of it, does not let replicas step apart.
    """

    def __init__(
        self, prepared: Prepared, context: Context, plan: ExchangePlan, outer: OuterOptimizer | None = None
    ) -> None:
        model = prepared.unwrap()
        replicas = context.ranks("data")
        if replicas.size == 1 < context.ranks("counts").size:
            raise ValueError(
                f"local updates of {type(model).__name__}: all {context.ranks('counts').size} ranks train one "
                "replica; say parallel.data=2 or more, the number of replicas that train apart"
            )
        if not isinstance(prepared, SupportsLocalSteps) or context.ranks("pipeline").size > 1:
            raise ValueError(
                f"local updates of {type(model).__name__}: this backend, or a pipeline, has no steps apart; use ddp "
                "or fsdp without parallel.pipeline"
            )
        with prepared.trained_alone():  # which says what the backend does not allow
            pass
        if any(is_low_bit(one.optimizer) for one in prepared.optimizers):
            raise ValueError(
                f"local updates of {type(model).__name__}: its optimizer holds states in few bits, whose mean cannot "
                "be taken; use one with states in 16 bits or more"
            )
        self.plan, self.num_steps = plan, 0
        self.is_open = False
        self._prepared, self._context, self._held = prepared, context, ExitStack()
        group = replicas.process_group if replicas.size > 1 else None
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts = in_fragments([p.numel() for _, p in trained], plan.fragments)
        averaged = {parts[-1]: _statistics(model)}  # with the last fragment
        self._fragments = [
            Fragment([trained[place] for place in part], averaged.get(part, []), group, outer)
            for part in parts
        ]
        self._num_moves = 0  # steps of all optimizers, of which the last alone counts for the plan
        # The move after which the replicas' weights of a fragment became equal; None where they differ.
        self._exchanged: list[int | None] = [0] * len(parts)
        self._group = group

    @property
    def sent_bytes(self) -> int:
        """The bytes of all exchanges of weights so far, of each sum as a whole."""
        return sum(fragment.sent_bytes for fragment in self._fragments)

    def __enter__(self) -> Self:
        """Let replicas step on their own gradients. Called on all ranks."""
        assert isinstance(self._prepared, SupportsLocalSteps)
        self.renew()  # the weights may have moved since
        self._held.enter_context(self._prepared.trained_alone())
        for optimizer in self._prepared.optimizers:
            own = [self._move, *([self._count] if optimizer is self._prepared.optimizers[-1] else [])]
            optimizer.on_step = [*optimizer.on_step, *own]
            self._held.callback(_without, optimizer, own)  # what others have added in the block stays
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the replicas equal, and average gradients again. Called on all ranks."""
        self.is_open = False
        with self._held:
            if kind is None:
                self.exchange_all()
                logger.info(
                    "local updates: %d steps apart, %d bytes of weights exchanged",
                    self.num_steps,
                    self.sent_bytes,
                )

    def exchange(self) -> None:
        """Exchange all weights now. Called on all ranks.

        An exchange that is under way is begun anew. Weights that no optimizer has moved since their exchange are
        left: the outer optimizer's momentum would move them once more.
        """
        is_counted = bool(self._prepared.optimizers)
        waiting = [n for n, move in enumerate(self._exchanged) if move != self._num_moves or not is_counted]
        for place in waiting:
            self._fragments[place].drop()
            self._fragments[place].begin()
        for place in waiting:
            self._fragments[place].end()
            self._exchanged[place] = self._num_moves
        self._forget_sums()

    @torch.no_grad()
    def exchange_all(self) -> None:
        """Make the replicas equal: exchange all weights, and average the optimizers' states. Called on all ranks.

        States that some replica lacks, of a weight that got no gradient there, are dropped on all: the optimizer
        begins them anew.
        """
        self.exchange()
        if self._group is None:
            return
        held = {
            (number, place): optimizer.state.get(parameter, {})
            for number, optimizer in enumerate(self._prepared.optimizers)
            for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        own = {key: _averaged(state) for key, state in held.items()}
        of_replicas = gather_object(
            self._context, {key: sorted(tensors) for key, tensors in own.items()}, over="data"
        )
        for key, tensors in own.items():
            if any(one[key] != of_replicas[0][key] for one in of_replicas):
                held[key].clear()
                continue
            for name in sorted(tensors):
                tensor = local(tensors[name])
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
                summed = wide.to(self._context.device)
                dist.all_reduce(summed, group=self._group)
                tensor.copy_(summed / dist.get_world_size(self._group))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the outer optimizer's states by the name of the weight."""
        outer = {name: state for fragment in self._fragments for name, state in fragment.states().items()}
        return {"num_steps": self.num_steps, "outer": outer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of any number of replicas and fragments, after the model's weights; see `renew`."""
        self.num_steps = state_dict["num_steps"]
        for fragment in self._fragments:
            fragment.load(state_dict["outer"])

    def renew(self) -> None:
        """Take the model's weights for the outer ones, as after loading. Called on all ranks."""
        for fragment in self._fragments:
            fragment.renew()
        self._exchanged = [self._num_moves] * len(self._fragments)

    def _move(self) -> None:
        self._num_moves += 1

    def _count(self) -> None:
        """Count an inner step, and begin or end what the plan says."""
        self.num_steps += 1
        if (begun := self.plan.begins(self.num_steps)) is not None:
            self._fragments[begun].begin()
        # With a delay of 0, what has begun ends here.
        if (ended := self.plan.ends(self.num_steps)) is not None:
            self._fragments[ended].end(local_share=self.plan.local_share if self.plan.delay else 0.0)
            self._exchanged[ended] = None if self.plan.delay else self._num_moves
            self._forget_sums()

    def _forget_sums(self) -> None:
        """Drop what roundings of bf16 weights have left over, which belongs to weights that are no more."""
        for optimizer in self._prepared.optimizers:
            forget_updates(optimizer.optimizer, "stochastic")


def _without(optimizer: PreparedOptimizer, own: Sequence[Callable[[], None]]) -> None:
    optimizer.on_step = [call for call in optimizer.on_step if call not in own]


def _averaged(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state whose mean is one: moments, and counts of steps as numbers."""
    return {name: one for name, one in state.items() if isinstance(one, Tensor) and one.is_floating_point()}


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers that training changes and a checkpoint keeps, such as a batch norm's means."""
    kept = model.state_dict()
    return [one for name, one in model.named_buffers() if name in kept and one.is_floating_point()]
