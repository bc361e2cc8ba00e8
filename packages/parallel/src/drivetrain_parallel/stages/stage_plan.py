"""The plan of stages: which blocks of a model are a stage, and which ranks hold them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.sequences.blocks import find_blocks

_STACK = "nn.ModuleList or nn.Sequential of blocks of one class, which could be divided into stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The stages of a model.

    Attributes:
        ranks: The rank that holds each stage.
        blocks: The names of the model's blocks, in order.
        starts: The index of the first block of each stage.
        outside: The stage of each module outside of the blocks that has parameters of its own, or buffers in the
            state dict: the first or the last.
        holders: The ranks that hold each parameter, by each of its names; several for one that stages share.
    """

    ranks: tuple[int, ...]
    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    outside: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    def blocks_of(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's blocks."""
        return self.blocks[self.starts[stage] : (*self.starts, len(self.blocks))[stage + 1]]


def plan_stages(
    model: nn.Module,
    ranks: Sequence[int],
    *,
    splits: Sequence[str] | None = None,
    last: Sequence[str] = (),
) -> StagePlan:
    """Plan the stages of a model. Pure: nothing is changed or sent.

    The blocks are those that `plan_sequences` finds. What the model lists before its first block belongs to the first
    stage, what it lists after them to the last. Stages are balanced by the parameters of which they compute products.

    Args:
        model: The model, on any device, meta included.
        ranks: The rank of each stage.
        splits: The names of the first blocks of all stages but the first; by default as balanced.
        last: Patterns of the names of modules that run after the blocks, though the model lists them before.

    Raises:
        ParallelPlanError: The model has fewer blocks than stages, or none; or what is given names nothing.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
        >>> plan = plan_stages(model, [0, 1])
        >>> plan.blocks_of(0), plan.blocks_of(1), plan.holders["0.weight"]
        (('1.0',), ('1.1', '1.2'), (0,))
    """
    kind, number = type(model).__name__, len(ranks)
    blocks = find_blocks(model, number, setting="parallel.pipeline").blocks
    if not blocks:
        raise ParallelPlanError(f"{kind} has no {_STACK}: leave parallel.pipeline out")
    if len(blocks) < number:
        raise ParallelPlanError(
            f"{kind} has {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}) for {number} stages: at most "
            f"{len(blocks)} stages would do"
        )
    after = _names_after(model, blocks[0], last)
    costs = [_num_computed(model.get_submodule(name)) for name in blocks]
    outside = [(name, m) for name, m in model.named_modules() if not _is_inside(name, blocks)]
    ends = [sum(_num_computed(m, recurse=False) for name, m in outside if (name in after) == is_after)
            for is_after in (False, True)]  # fmt: skip
    costs[0] += ends[0]
    costs[-1] += ends[1]
    starts = _balanced(costs, number) if splits is None else _starts_of(blocks, splits, number)
    stage_of = {name: sum(start <= at for start in starts) - 1 for at, name in enumerate(blocks)}
    found: dict[nn.Parameter, set[int]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        owner = name.rpartition(".")[0]
        block = next((one for one in blocks if owner == one or owner.startswith(f"{one}.")), None)
        stage = stage_of[block] if block is not None else number - 1 if owner in after else 0
        found.setdefault(parameter, set()).add(ranks[stage])
    holders = {name: tuple(sorted(found[parameter])) for name, parameter in named}
    kept = {name.rpartition(".")[0] for name in model.state_dict(keep_vars=True)}
    owners = {
        name: number - 1 if name in after else 0
        for name, _ in model.named_modules(remove_duplicate=False)
        if name in kept and not _is_inside(name, blocks)
    }
    return StagePlan(ranks=tuple(ranks), blocks=blocks, starts=starts, outside=owners, holders=holders)


def _names_after(model: nn.Module, first: str, last: Sequence[str]) -> frozenset[str]:
    """Return the names of the modules that run after the blocks: those that follow the first, or match a pattern."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in last:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ParallelPlanError(
                f"parallel.pipeline_last: {pattern!r} matches no module of {type(model).__name__}"
            )
    matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in last)]
    return frozenset(
        name
        for at, name in enumerate(names)
        if at >= names.index(first) or any(name == one or name.startswith(f"{one}.") for one in matched)
    )


def _is_inside(name: str, blocks: Sequence[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _num_computed(module: nn.Module, *, recurse: bool = True) -> int:
    """Return the number of parameters that a forward multiplies by: embeddings are looked up."""
    modules = module.modules() if recurse else (module,)
    return sum(
        parameter.numel()
        for each in modules
        if not isinstance(each, nn.Embedding)
        for parameter in each.parameters(recurse=False)
    )


def _starts_of(blocks: Sequence[str], splits: Sequence[str], number: int) -> tuple[int, ...]:
    unknown = [name for name in splits if name not in blocks]
    starts = (0, *(blocks.index(name) for name in splits if name in blocks))
    if unknown or len(starts) != number or list(starts) != sorted(set(starts)):
        raise ParallelPlanError(
            f"parallel.pipeline_splits={list(splits)!r}: {number} stages take the names of {number - 1} blocks in "
            f"order, each the first of a stage but the first one, among {blocks[0]} to {blocks[-1]}"
        )
    return starts


def _balanced(costs: Sequence[float], number: int) -> tuple[int, ...]:
    """Return the first index of each of `number` runs of items, whose costs are as equal as can be.

    Example:
        >>> _balanced([1, 1, 1, 1, 1, 3], 3)
        (0, 2, 5)
    """
    before, length = [0.0, *accumulate(costs)], len(costs)
    # Of the first `end` items in so many runs: the least sum of squares, and where the last run starts.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for run in range(1, number + 1):
        found: dict[int, tuple[float, int]] = {}
        for end in range(run, length - (number - run) + 1):
            found[end] = min(
                (sum_ + (before[end] - before[start]) ** 2, start)
                for start, (sum_, _) in best[-1].items()
                if start < end
            )
        best.append(found)
    starts: list[int] = []
    end = length
    for found in reversed(best[1:]):
        end = found[end][1]
        starts.append(end)
    return tuple(reversed(starts))
