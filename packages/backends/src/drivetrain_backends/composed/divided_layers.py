"""Tensor parallelism for any strategy: its layers are divided before anything else is done to a model."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.composed.divided_layout import DividedLayout
from drivetrain_backends.composed.divided_sequences import (
    DivideSequences,
    compare_first_input,
    refuse_divided,
)
from drivetrain_backends.composed.strategy import ModelTransform, StepGuard, Strategy
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.packed_weights import parts_of
from drivetrain_backends.optim.divided_trial import check_steps_parts
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_messages import format_count
from drivetrain_parallel import (
    BetweenPlan,
    Cut,
    GroupRanks,
    ParallelPlan,
    divide_between_layers,
    divide_model,
    named_cuts,
    plan_between_layers,
    plan_model,
)
from drivetrain_precision import is_low_bit
from drivetrain_state import Context, broadcast_object, synchronize_rng_states
from drivetrain_state.rank_group import end_group
from drivetrain_weights.meta_init import initialise, replace_meta_tensors

logger = logging.getLogger(__name__)


def across_axes(strategy: Strategy, context: Context) -> Strategy:
    """Return a strategy of data parallel ranks for a mesh with other axes."""
    if context.ranks("context").size > 1:
        strategy = replace(strategy, transforms=(DivideSequences(context), *strategy.transforms))
    if context.ranks("counts").size == context.topology.world_size:
        return strategy
    divide = DivideLayers(context)
    strategy.gradients.partners = context.ranks("replica").process_group
    layout = DividedLayout(strategy.layout, divide.cuts, divide.replaced)
    return replace(
        strategy,
        transforms=(divide, *strategy.transforms),
        layout=layout,
        guards=(*strategy.guards, WholeWeightsGuard(layout)),
    )


class WholeWeightsGuard(StepGuard):
    """Refuse weights that ranks hold whole and that differ after the first step.

    They then did not compute the same outside the divided layers: they read other batches, or drew other numbers.
    """

    def __init__(self, layout: DividedLayout) -> None:
        self._layout = layout
        self._checked = WeakSet[GradientGroup]()

    def after_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Compare the weights once. Called on all ranks."""
        del optimizer
        if group not in self._checked:
            self._checked.add(group)
            self._layout.open(group.models)
            self._layout.check_whole(group.models)


class DivideLayers(ModelTransform):
    """Give all ranks rank 0's values, and divide the layers of each model among the ranks of the tensor axis.

    A model stays divided for as long as it lives: `release` changes nothing, and a later `prepare` takes it as it is.

    Attributes:
        cuts: The division of each divided model's parameters, by name.
        replaced: The parameters of layers that were on meta, with those that hold values in their place.
    """

    def __init__(self, context: Context) -> None:
        self.cuts = WeakIdKeyDictionary()
        self.replaced = WeakIdKeyDictionary()
        self._context = context
        self._size = context.ranks("tensor").size
        self._styles = None if context.parallelism is None else context.parallelism.tensor_styles
        self._is_between = context.parallelism is not None and bool(context.parallelism.sequence)
        self._plans: dict[nn.Module, ParallelPlan] = {}
        self._between: dict[nn.Module, BetweenPlan] = {}
        self._shown: dict[str, str] = {}
        self._meetings: ProcessGroup | None = None

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Plan the division of new models; refuse models and optimizers that cannot be divided.

        Raises:
            ValueError: Styles or sizes do not fit the model, or an optimizer keeps states that cannot be divided.
        """
        self._plans.clear()
        self._between.clear()
        for model in models:
            if self._find(model) is None:
                refuse_divided(model)
        if self._size == 1:
            return
        for optimizer in optimizers:
            if is_low_bit(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} under tensor={self._size}: blocks of low-bit states cross the parts "
                    "of a weight; use an optimizer with states in floating point"
                )
        for model in models:
            if self._find(model) is None:
                plan = self._plans[model] = plan_model(unwrap_compiled(model), self._size, self._styles)
                if self._is_between and plan.layers:
                    self._between[model] = plan_between_layers(unwrap_compiled(model), plan)
        if any(plan.layers for plan in self._plans.values()) or any(self.cuts.values()):
            for optimizer in optimizers:
                check_steps_parts(optimizer, self._context, num_ranks=self._size)

    def apply(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's values, and divide a model that is not divided yet. Called on all ranks."""
        inner, known = unwrap_compiled(model), self._find(model)
        if known is not None:
            self.cuts[model] = known
            return model
        plan = self._plans.get(model, ParallelPlan(size=self._size))
        cuts = {name: cut for name, _, cut in named_cuts(inner, plan)}
        self._fill(inner, {name.rpartition(".")[0] for name in cuts})
        broadcast_parts(self._values(inner), self._context, over="world")
        if plan.layers:
            group = self._context.ranks("tensor").process_group
            assert group is not None  # of several ranks
            ranks = GroupRanks(group, host=self._meeting_place(plan))
            divide_model(inner, plan, ranks, device=self._context.device)
            if (between := self._between.get(model)) is not None:
                divide_between_layers(inner, between, ranks, device=self._context.device)
            compare_first_input(inner, self._context, over="tensor")
            # Outside divided layers these ranks drop the same elements, and inside each draws its own.
            synchronize_rng_states(self._context, ("torch", "accelerator"), over="tensor")
        self.cuts[model] = cuts
        self._show(inner, plan)
        return model

    def fail(self, error: BaseException) -> None:
        """Note in `error` that models may be divided by now."""
        if self._size > 1:
            error.add_note("prepare() failed: models may hold this rank's part of their layers by now")

    def applied(self) -> Mapping[str, object]:
        """Return what is divided, in words."""
        said = "; ".join(f"{kind}: {layers}" for kind, layers in self._shown.items())
        return {"divided": f"among {self._size} ranks: {said}"} if said else {}

    def _meeting_place(self, plan: ParallelPlan) -> ProcessGroup | None:
        """Return a group where a rank waits that asks alone for whole logits. Called on all ranks."""
        if self._meetings is None and any(layer.style == "vocabulary_column" for layer in plan.layers):
            self._meetings = self._context.ranks("tensor").new_group(backend="gloo")
            self._context.before_close(partial(end_group, self._meetings.group_name))
        return self._meetings

    def _find(self, model: nn.Module) -> Mapping[str, Cut] | None:
        """Return the division of a model that an earlier `prepare` divided, compiled or not."""
        inner = unwrap_compiled(model)
        return next((cuts for other, cuts in self.cuts.items() if unwrap_compiled(other) is inner), None)

    def _values(self, model: nn.Module) -> list[Tensor]:
        """Return the tensors of a model that have values."""
        tensors = (*model.parameters(), *model.buffers())
        return [part for one in tensors if not one.is_meta for part in parts_of(one)]

    def _fill(self, model: nn.Module, divided: set[str]) -> None:
        """Give layers on meta their values before they are divided: those that they have on one rank."""
        names = {module: name for name, module in model.named_modules()}
        layers = [model.get_submodule(name) for name in sorted(divided)]
        on_meta = [one for one in layers if any(p.is_meta for p in one.parameters(recurse=False))]
        if not on_meta:
            return
        seed = broadcast_object(self._context, int(torch.randint(2**31, ()).item()))
        around = [one for one in model.modules() if callable(getattr(one, "_init_weights", None))]
        for layer in on_meta:
            before = dict(layer.named_parameters(recurse=False))
            empty = replace_meta_tensors([layer], lambda p: torch.empty_like(p, device=self._context.device))
            self.replaced.update({p: getattr(layer, name) for name, p in before.items() if p.is_meta})
            initialise(empty, names, around[:1], seed)

    def _show(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Remember for the plan, and log once, what is divided and what is left."""
        if self._size == 1:
            return
        kind = type(model).__name__
        sources = ", ".join(sorted(set(plan.sources.values()))) or "none"
        said = f"{format_count(len(plan.layers), 'layer')} ({sources})"
        self._shown[kind] = f"{said}, {len(plan.left)} left" if plan.left else said
        if self._context.topology.is_main and not plan.layers:
            logger.warning(
                "tensor=%d: no layer of %s can be divided; each of these ranks computes the whole of it",
                self._size,
                kind,
            )
        elif self._context.topology.is_main:
            logger.info("%s among %d ranks: %s", kind, self._size, self._shown[kind])
            for name, reason in plan.left.items():
                logger.debug("%s stays whole: %s", name, reason)
