"""A check that all ranks gather and reduce the same blocks in the same order.

FSDP's collectives carry no names: ranks match them by their order. If a rank gathers another block of the same size,
both ranks compute with mixed weights, without an error. Each rank therefore keeps a running checksum of its
collectives, and the ranks compare checksums before an optimizer steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import StepGuard
from drivetrain_backends.fsdp.compat import parameter_groups, wrap_collectives
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.gradients.nonfinite import list_ranks
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_backends.modules.shared_buffers import SharedBuffers
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_state import CollectiveMismatchError, Context, ProgressMark

_MOST_REMEMBERED = 65536  # collectives since the last step, for the error that names the first difference
_PASSES = 4  # forward, backward, reduction, and one spare: the first use of every block is compared at once
_MASK = (1 << 61) - 1
_DOING = {"gather": "gathering", "reduce": "reducing", "scale": "computing the scales of"}


class CollectiveOrder:
    """The order of this rank's collectives, and its comparison with that of the other ranks.

    Called on all ranks in the same order. CPUs exchange the checksums in a separate process group. The exchange thus
    never waits for a device and never matches a collective of a block. `divisions` are the groups of ranks that
    gather together; each rank is in exactly one group.
    """

    def __init__(self, context: Context, divisions: Sequence[Sequence[int]]) -> None:
        self._context = context
        self._ranks = context.ranks("counts")
        self._divisions = [[self._ranks.ranks.index(rank) for rank in ranks] for ranks in divisions]
        self._labels: list[str] = []
        self._past: deque[int] = deque(maxlen=_MOST_REMEMBERED)
        self._num_past = 0
        self._checksum = self._reductions = 0
        self._num_compared_at_once = 0
        # A weak reference: torch holds the group until it ends, and its threads would outlive the process group.
        self._group: Callable[[], ProcessGroup | None] = lambda: None

    def close(self) -> None:
        """Destroy the process group of the checksums; `open` makes a new group. Called on all ranks."""
        self._num_compared_at_once = 0
        if (group := self._group()) is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self._group = lambda: None
        self._forget()

    def _forget(self) -> None:
        """Forget the recorded collectives: after an error, ranks may have run different numbers of collectives."""
        self._past.clear()
        self._num_past = self._checksum = self._reductions = 0

    def open(self, model: ShardedModel) -> None:
        """Compare a model's collectives from now on, until `close`. Called on all ranks."""
        if self._ranks.size == 1:
            return
        if self._group() is None:
            made = self._ranks.new_group(backend="gloo")
            # A rank that closed the group at once would break connections that others are still making.
            dist.barrier(made)
            # Models of an earlier training may have run since; what is compared begins alike.
            self._forget()
            self._group = ref(made)
        # Ranks of different replicas gather independently, and may differ there.
        if len(self._divisions) == 1:
            self._num_compared_at_once += _PASSES * sum(len(parameter_groups(b)) for b in model.blocks)

    def watch(self, model: ShardedModel) -> None:
        """Record the order of a model's collectives, for as long as the model lives."""
        if self._ranks.size == 1:
            return
        names = [*model.plan.blocks, ""]
        kind = class_name(model.module)
        for name, block in zip(names, model.blocks, strict=True):
            what = f"{name} of {kind}" if name else f"what {kind} holds outside its blocks"
            for group in parameter_groups(block):
                reduce = partial(
                    _Recorded, note=self.noting("reduce", what), at_allocation=len(self._divisions[0]) == 1
                )
                wrap_collectives(group, partial(_Recorded, note=self.noting("gather", what)), reduce)

    def compare(self, news: int = 0, *, at_step: bool = True) -> list[int]:
        """Compare the order of blocks across ranks, and return every rank's `news`. Called on all ranks.

        Called before reduced values are used. A different order is refused; the message names the first difference.
        """
        group = self._group()
        if group is None:
            return [news]
        if at_step:
            self._context.progress.mark(ProgressMark.COMPARING)
        mine = torch.tensor([self._checksum, self._reductions, self._num_past, news], device="cpu")
        table = mine.new_empty(self._ranks.size * 4)
        dist.all_gather_into_tensor(table, mine, group=group)
        if at_step:
            self._context.progress.note(ProgressMark.COMPARING_DONE)
        rows: list[list[int]] = table.view(-1, 4).tolist()
        reduce_alike = all(row[1] == rows[0][1] for row in rows)  # gradients are averaged over all replicas
        if not reduce_alike or not all(
            rows[rank][:3] == rows[ranks[0]][:3] for ranks in self._divisions for rank in ranks
        ):
            raise self._mismatch(group)
        if at_step:
            self._past.clear()
        return [row[3] for row in rows]

    def compare_gathered(self) -> None:
        """Compare the order of blocks after a forward without a later step, if all ranks gather together.

        Called on all ranks. Different replicas may run different forwards, and are compared only at steps.
        """
        if len(self._divisions) == 1:
            self.compare(at_step=False)

    def noting(self, kind: Literal["gather", "reduce", "scale"], what: str) -> Callable[[], None]:
        """Return a function that records a collective on `what` when called before it. Called on all ranks."""
        label = len(self._labels)
        self._labels.append(f"{kind} {what}")
        mark = f"{_DOING[kind]} {what}"
        progress, is_reduction = self._context.progress, kind == "reduce"

        def note() -> None:
            progress.mark(mark)
            self._past.append(label)
            self._num_past += 1
            self._checksum = (self._checksum * 1000003 + label + 1) & _MASK
            if is_reduction:
                self._reductions = (self._reductions * 1000003 + label + 1) & _MASK
            if self._num_compared_at_once > 0 or self._context.settings.debug:
                self._num_compared_at_once -= 1
                self.compare(at_step=False)

        return note

    def _mismatch(self, group: ProcessGroup) -> CollectiveMismatchError:
        """Return the error that names the first collective that differs between ranks. Called on all ranks."""
        said: list[Any] = [None] * self._ranks.size
        begins = self._num_past - len(self._past)
        dist.all_gather_object(said, (begins, [self._labels[label] for label in self._past]), group=group)
        start = max(begins for begins, _ in said)
        orders = [names[start - begins :] for begins, names in said]
        longest = max(map(len, orders))
        first = next(
            (i for i in range(longest) if len({tuple(order[i : i + 1]) for order in orders}) > 1), longest
        )
        found: dict[str, list[int]] = {}
        for rank, order in enumerate(orders):
            found.setdefault(order[first] if first < len(order) else "nothing more", []).append(
                self._ranks.ranks[rank]
            )
        shown = "; ".join(f"{list_ranks(ranks)}: {what}" for what, ranks in found.items())
        return CollectiveMismatchError(
            f"ranks do not run the same blocks in the same order: collective {first + 1} since the last step is\n"
            f"  {shown}\nFSDP pairs them up by their order, so that weights and gradients of one block would go "
            "into another. Nothing was stepped. Run every block on every rank (one without work of its own with an "
            "input of zeros and a loss times 0), make what differs one block with what is around it (fsdp.wrap), or "
            "use backend='ddp'. state.debug=True compares before every collective"
        )


class BlockOrderGuard(StepGuard):
    """Compare the order of blocks before gradients are used, and broadcast buffers that have changed."""

    def __init__(self, order: CollectiveOrder, buffers: SharedBuffers) -> None:
        self._order, self._buffers = order, buffers

    def before_clip(self, group: GradientGroup) -> None:
        """Compare, once no backward runs."""
        group.check_ended()
        self._buffers.share(self._order.compare(self._buffers.news()))

    def before_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Compare, unless a clip has compared."""
        del optimizer
        group.check_ended()
        if group.stage != "final":
            self.before_clip(group)

    def close(self) -> None:
        """Destroy the process group of the checksums. Called on all ranks."""
        self._order.close()


class _Recorded:
    """The all-gather of a block or the reduction of its gradients, recorded before torch runs it.

    With one rank per replica, torch calls the reduction object only to allocate, and averages over the replicas
    without it. The reduction is then recorded `at_allocation`.
    """

    def __init__(self, inner: Any, note: Callable[[], None], *, at_allocation: bool = False) -> None:
        self._inner, self._note, self._at_allocation = inner, note, at_allocation

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._at_allocation:
            self._note()
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._inner(*args, **kwargs)
