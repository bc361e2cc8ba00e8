"""Pipeline parallelism for any strategy: each rank keeps the layers of its stages, and trains them by a schedule."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.composed.divided_sequences import check_same_plan, compare_first_input
from drivetrain_backends.composed.strategy import ModelTransform
from drivetrain_backends.modules.compile import strip_wrapper_prefix, unwrap_compiled
from drivetrain_parallel.layers.divided_layers import with_forward
from drivetrain_parallel.stages.absent import AbsentTensor, absent_like
from drivetrain_parallel.stages.links import GroupLinks
from drivetrain_parallel.stages.runner import StageRunner
from drivetrain_parallel.stages.schedules import find_schedule
from drivetrain_parallel.stages.stage_model import keep_stages
from drivetrain_parallel.stages.stage_plan import StagePlan, plan_stages
from drivetrain_state import Context, gather_object
from drivetrain_state.collectives.nested import leaves_with_paths, rebuild
from drivetrain_state.mesh import ParallelDims
from drivetrain_state.rank_group import end_group

logger = logging.getLogger(__name__)
PIECES_PER_RANK = 4  # micro-batches of a batch for each rank of a pipeline, if the settings do not say


class StagedModel:
    """A model of which this rank keeps some stages.

    Attributes:
        runner: The runner of the stages.
        names: The names of all entries of the whole model's state, in order.
        holders: The positions, among the ranks of the pipeline, of those that hold an entry.
        shared: The group of the ranks that hold a parameter, of parameters that several hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = tuple(map(strip_wrapper_prefix, model.state_dict(keep_vars=True)))
        self.holders: Mapping[str, tuple[int, ...]] = {}
        self.runner: StageRunner
        self.shared: dict[str, ProcessGroup] = {}


class KeepStages(ModelTransform):
    """Keep the layers of this rank's stages of each model, and have a forward of the model pass through all ranks.

    A model stays divided for as long as it lives: `release` changes nothing, and a later `prepare` takes it as it is.

    Attributes:
        models: The models that are divided, each with its `StagedModel`.
        gone: The parameters of other ranks' stages.
    """

    def __init__(self, context: Context) -> None:
        self.models: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.gone: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._context = context
        self._ranks = context.ranks("pipeline")
        self._settings = context.parallelism or ParallelDims()
        self.schedule = find_schedule(self._settings.pipeline_schedule or "1f1b")
        self._plans: dict[nn.Module, StagePlan] = {}
        self._shown: dict[str, str] = {}
        self._groups: dict[tuple[int, int], ProcessGroup] = {}

    @property
    def num_pieces(self) -> int:
        """The number of micro-batches that a batch is cut into, if it has as many samples."""
        return self._settings.pipeline_micro_batches or PIECES_PER_RANK * self._ranks.size

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Plan the stages of new models.

        Raises:
            ValueError: A model has no blocks, or fewer than stages; or what the settings name is not there.
        """
        del optimizers
        self._plans.clear()
        for model in map(unwrap_compiled, models):
            if model not in self.models:
                self._plans[model] = plan_stages(
                    model,
                    self.schedule.ranks(self._ranks.size),
                    splits=self._settings.pipeline_splits,
                    last=self._settings.pipeline_last or (),
                )

    def apply(self, model: nn.Module) -> nn.Module:
        """Drop the layers of other stages. Called on all ranks."""
        inner = unwrap_compiled(model)
        if (plan := self._plans.pop(inner, None)) is None:
            return model
        check_same_plan(plan, inner, self._context, over="pipeline")
        staged, before = StagedModel(inner), set(inner.parameters())
        stages = keep_stages(inner, plan, self._ranks.index, device=self._context.device)
        links = GroupLinks([self._ranks.ranks[rank] for rank in plan.ranks], self._groups_between(plan))
        staged.runner = StageRunner(stages, self.schedule, links, self._ranks.size)
        self.gone.update(dict.fromkeys(before.difference(inner.parameters()), True))
        held = gather_object(
            self._context, list(map(strip_wrapper_prefix, inner.state_dict())), over="pipeline"
        )
        staged.holders = {
            name: tuple(rank for rank, names in enumerate(held) if name in names) for name in staged.names
        }
        several = sorted({ranks for ranks in staged.holders.values() if len(ranks) > 1})
        groups = {ranks: self._group_of(ranks) for ranks in several}
        staged.shared = {
            name: groups[ranks]
            for name, ranks in staged.holders.items()
            if len(ranks) > 1 and self._ranks.index in ranks
        }
        with_forward(inner, partial(self._forward, staged))
        compare_first_input(inner, self._context, over="pipeline")
        self.models[inner] = staged
        kept = [f"{plan.blocks_of(one)[0]} to {plan.blocks_of(one)[-1]}" for one in stages.stages]
        self._shown[type(inner).__name__] = f"{plan.num_stages} stages, here {' and '.join(kept)}"
        logger.info("%s: %s", type(inner).__name__, self._shown[type(inner).__name__])
        return model

    def applied(self) -> Mapping[str, object]:
        """Return the stages, in words."""
        said = "; ".join(f"{kind}: {stages}" for kind, stages in self._shown.items())
        return {"stages": f"{self.schedule.name} among {self._ranks.size} ranks: {said}"} if said else {}

    def _forward(
        self,
        staged: StagedModel,
        model: nn.Module,
        whole: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a forward through all stages, unless a stage is running; return on all ranks what the last computes."""
        if staged.runner.model.is_running:
            return whole(model, *args, **kwargs)
        (found,) = staged.runner.evaluate([partial(whole, model, *args, **kwargs)])
        return self.share(found, staged)

    def share(self, found: Any, staged: StagedModel) -> Any:
        """Return on all ranks what the last stage computed. Called on all ranks."""
        last = staged.runner.model.plan.ranks[-1]
        source, group = self._ranks.ranks[last], self._ranks.process_group
        is_here, device = self._ranks.index == last, self._context.device
        # What other stages' blocks return is absent there too, such as the hidden states of all layers.
        known: list[Any] = [[one.of if isinstance(one, AbsentTensor) else "" for one in _tensors_of(found)]]
        dist.broadcast_object_list(known, source, group=group)
        missing = iter(known[0])

        def send(one: Tensor) -> Tensor:
            if of := next(missing):
                return absent_like(one, of)
            value = one.contiguous() if is_here else torch.empty(one.shape, dtype=one.dtype, device=device)
            # As bytes: gloo supports neither booleans nor fp8.
            dist.broadcast(value.view(-1).view(torch.uint8), source, group=group)
            return value

        return rebuild(found, map(send, _tensors_of(found)))

    def _groups_between(self, plan: StagePlan) -> Mapping[tuple[int, int], ProcessGroup]:
        """Return the group for each direction between two stages. Called on all ranks."""
        between = [(stage, stage + 1) for stage in range(plan.num_stages - 1)]
        for pair in (*between, *((to, source) for source, to in between)):
            if pair not in self._groups:
                self._groups[pair] = self._ranks.new_group()
                self._context.before_close(partial(end_group, self._groups[pair].group_name))
        return self._groups

    def _group_of(self, holders: Sequence[int]) -> ProcessGroup:
        """Return the group of some ranks of this pipeline. Called on all ranks."""
        if len(holders) == self._ranks.size:
            return cast("ProcessGroup", self._ranks.process_group)
        made = [dist.new_group(ranks=[part[at] for at in holders]) for part in self._ranks.parts]
        group = next((one for one in made if isinstance(one, ProcessGroup)), None)
        if group is not None:
            self._context.before_close(partial(end_group, group.group_name))
        return cast("ProcessGroup", group)  # not used on other ranks


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length that most of its tensors have.

    Of lengths that as many have, it is that of tensors with more dimensions.

    Raises:
        ValueError: No tensor has samples, or the tensors do not tell which of their lengths counts samples.
    """
    tensors = [one for one in _tensors_of(batch) if one.dim() and len(one)]
    numbers = Counter(map(len, tensors))
    if not numbers:
        raise ValueError("the batch holds no tensor with samples along its first dimension")
    ranked = sorted(
        (
            (numbers[length], max(one.dim() for one in tensors if len(one) == length), length)
            for length in numbers
        ),
        reverse=True,
    )
    if len(ranked) > 1 and ranked[0][:2] == ranked[1][:2]:
        raise ValueError(
            f"the batch holds tensors of {ranked[1][2]} and of {ranked[0][2]} rows: say which count samples, by a "
            "batch of which most tensors have a row for each sample"
        )
    return ranked[0][2]


def cut_batch(batch: Any, number: int) -> list[tuple[Any, float]]:
    """Return a batch in at most `number` pieces of about equal size, each with its share of the samples.

    Tensors with a row for each sample are cut; all else is in every piece.

    Raises:
        ValueError: See `num_samples`.

    Example:
        >>> [(piece["x"].tolist(), share) for piece, share in cut_batch({"x": torch.arange(3)}, 2)]
        [([0], 0.3333333333333333), ([1, 2], 0.6666666666666666)]
    """
    tensors, rows = _tensors_of(batch), num_samples(batch)
    ends = [rows * piece // min(number, rows) for piece in range(min(number, rows) + 1)]

    def cut(start: int, stop: int) -> Any:
        return rebuild(batch, (one[start:stop] if one.dim() and len(one) == rows else one for one in tensors))

    return [(cut(start, stop), (stop - start) / rows) for start, stop in pairwise(ends)]


def _tensors_of(data: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves_with_paths(data) if isinstance(leaf, Tensor)]
