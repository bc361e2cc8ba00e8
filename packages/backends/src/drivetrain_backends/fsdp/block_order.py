"""Whether all ranks gather and reduce the same blocks in the same order.

FSDP's collectives carry no names: they pair up over the ranks by their order. Where one rank gathers another block
of the same size, both compute with a mixture of weights, and nobody raises. Here each rank keeps a running checksum
of its collectives, and the ranks compare theirs before an optimizer steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from drivetrain_backends.fsdp.sharded_model import ShardedModel, parameter_groups
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_state import CollectiveMismatchError, Context

_MOST_REMEMBERED = 65536  # collectives between two steps, for the error that names the first that differs
_PASSES = (
    4  # forward, backward, reduction, and one to spare: the first use of every block is compared at once
)
_MASK = (1 << 61) - 1


class BlockOrder:
    """The order of this rank's collectives, and its comparison with the other ranks'.

    Called on all ranks in the same order. The checksums travel between CPUs, in a group of their own, so that they
    wait for no device and never pair up with a block.

    Args:
        context: Ranks; it has a process group.
        divisions: The ranks that gather together, each rank in one of them.
    """

    def __init__(self, context: Context, divisions: Sequence[Sequence[int]]) -> None:
        self._context = context
        self._divisions = [list(ranks) for ranks in divisions]
        self._labels: list[str] = []
        self._past: deque[int] = deque(maxlen=_MOST_REMEMBERED)
        self._num_past = 0
        self._checksum = self._reductions = 0
        self._num_compared_at_once = 0
        # torch holds the group until it ends; held here too, its threads would outlive the process group.
        self._group: Callable[[], ProcessGroup | None] = lambda: None

    def close(self) -> None:
        """End the group that checksums travel in, until a model is watched again. Called on all ranks."""
        self._num_compared_at_once = 0
        if (group := self._group()) is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self._group = lambda: None

    def watch(self, model: ShardedModel) -> None:
        """Keep the order of a model's collectives from now on. Called on all ranks."""
        if self._context.topology.world_size == 1:
            return
        if self._group() is None:
            self._group = ref(cast("ProcessGroup", dist.new_group(backend="gloo")))
        names = [*model.plan.blocks, ""]
        kind = class_name(model.module)
        for name, block in zip(names, model.blocks, strict=True):
            what = f"{name} of {kind}" if name else f"what {kind} holds outside its blocks"
            for group in parameter_groups(block):
                group._all_gather_comm = _Gathering(group._all_gather_comm, self._noting("gather", what))
                group._reduce_scatter_comm = _Reducing(
                    group._reduce_scatter_comm,
                    self._noting("reduce", what),
                    is_divided=len(self._divisions[0]) > 1,
                )
                # Ranks that share no copy gather apart from each other, and may differ there.
                self._num_compared_at_once += _PASSES if len(self._divisions) == 1 else 0

    def compare(self, news: int = 0, *, at_step: bool = True) -> list[int]:
        """Compare with the other ranks, before what was reduced is used. Called on all ranks.

        Args:
            news: A number that travels along, of 63 bits.
            at_step: Whether an optimizer is to step.

        Returns:
            The numbers of all ranks.

        Raises:
            CollectiveMismatchError: They ran other blocks, or in another order; the message names the first.
        """
        group = self._group()
        if group is None:
            return [news]
        if at_step:
            self._context.watch.mark("comparing the order of blocks at the step")
        mine = torch.tensor([self._checksum, self._reductions, self._num_past, news], device="cpu")
        table = mine.new_empty(self._context.topology.world_size * 4)
        dist.all_gather_into_tensor(table, mine, group=group)
        rows: list[list[int]] = table.view(-1, 4).tolist()
        reduce_alike = all(row[1] == rows[0][1] for row in rows)  # copies are averaged over all ranks
        if not reduce_alike or not all(
            rows[rank][:3] == rows[ranks[0]][:3] for ranks in self._divisions for rank in ranks
        ):
            raise self._mismatch(group)
        if at_step:
            self._past.clear()
        return [row[3] for row in rows]

    def compare_gathered(self) -> None:
        """Compare where all ranks gather together, after a forward whose outputs are used without a step.

        Called on all ranks. Ranks with a copy of their own may run other forwards, and are compared at steps alone.

        Raises:
            CollectiveMismatchError: See `compare`.
        """
        if len(self._divisions) == 1:
            self.compare(at_step=False)

    def _noting(self, kind: str, what: str) -> Callable[[], None]:
        label = len(self._labels)
        self._labels.append(f"{kind} {what}")
        mark = f"{'gathering' if kind == 'gather' else 'reducing'} {what}"
        watch, is_reduction = self._context.watch, kind == "reduce"

        def note() -> None:
            watch.mark(mark)
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
        """Find the first collective that differs, by the names that all ranks kept. Called on all ranks."""
        said: list[Any] = [None] * self._context.topology.world_size
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
            found.setdefault(order[first] if first < len(order) else "nothing more", []).append(rank)
        shown = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in found.items())
        return CollectiveMismatchError(
            f"ranks do not run the same blocks in the same order: collective {first + 1} since the last step is\n"
            f"  {shown}\nFSDP pairs them up by their order, so that weights and gradients of one block would go "
            "into another. Nothing was stepped. Run every block on every rank (one without work of its own with an "
            "input of zeros and a loss times 0), make what differs one block with what is around it (fsdp.wrap), or "
            "use backend='ddp'. state.debug=True compares before every collective"
        )


class _Gathering:
    """torch's all-gather of a block, noted before it runs."""

    def __init__(self, inner: Any, note: Callable[[], None]) -> None:
        self._inner, self._note = inner, note

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._inner(*args, **kwargs)


class _Reducing:
    """torch's reduction of a block's gradients, noted before it runs.

    Where no rank holds a part alone, torch calls it for memory only and averages over the copies by itself.
    """

    def __init__(self, inner: Any, note: Callable[[], None], *, is_divided: bool) -> None:
        self._inner, self._note, self._is_divided = inner, note, is_divided

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self._is_divided:
            self._note()
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._inner(*args, **kwargs)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
