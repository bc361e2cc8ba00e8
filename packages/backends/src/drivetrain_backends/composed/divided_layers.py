"""Tensor parallelism for any strategy: its layers are divided before anything else is done to a model."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.composed.divided_layout import DividedLayout
from drivetrain_backends.composed.divided_sequences import (
    DivideSequences,
    check_same_plan,
    compare_first_input,
    refuse_divided,
)
from drivetrain_backends.composed.stage_layout import StageLayout
from drivetrain_backends.composed.stages import KeepStages
from drivetrain_backends.composed.strategy import ModelTransform, StepGuard, Strategy
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.packed_weights import parts_of
from drivetrain_backends.optim.divided_trial import check_steps_parts
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.state_dict.tensor_part import TensorDivision
from drivetrain_messages import format_count
from drivetrain_parallel import (
    BetweenPlan,
    GroupRanks,
    ParallelPlan,
    divide_between_layers,
    divide_model,
    named_cuts,
    plan_between_layers,
    plan_experts,
    plan_model,
)
from drivetrain_precision import is_low_bit
from drivetrain_state import Context, broadcast_object, synchronize_rng_states
from drivetrain_state.mesh import View
from drivetrain_state.rank_group import end_group
from drivetrain_weights.meta_init import initialise, replace_meta_tensors

logger = logging.getLogger(__name__)

_Planner: TypeAlias = Callable[[nn.Module, int], ParallelPlan]
_MOST_LEFT = 4  # names of modules that are shown
_KINDS: Mapping[View, str] = MappingProxyType({"tensor": "", "expert": " of experts"})  # of layers, in words


def across_axes(strategy: Strategy, context: Context) -> Strategy:
    """Return a strategy of data parallel ranks for a mesh with other axes, or of ranks that hold different experts.

    Raises:
        ValueError: The strategy or the mesh does not divide experts.
    """
    stages = KeepStages(context) if context.ranks("pipeline").size > 1 else None
    if stages is not None:
        refuse_divided_sequences(context)
        if stages.schedule.splits_backward and (reason := strategy.gradients.not_split) is not None:
            raise ValueError(f"parallel.pipeline_schedule={stages.schedule.name!r}: {reason}")
        strategy = replace(strategy, transforms=(stages, *strategy.transforms), stages=stages)
    if context.ranks("context").size > 1:
        strategy = replace(strategy, transforms=(DivideSequences(context), *strategy.transforms))
    if context.ranks("expert").size > 1:
        check_experts(strategy, context)
    elif context.ranks("counts").size == context.topology.world_size:
        return strategy
    divide = DivideLayers(context)
    if context.ranks("replica").size > 1:
        strategy.gradients.partners = context.ranks("replica").process_group
    layout = DividedLayout(strategy.layout, divide.divisions, divide.by_parameter, divide.replaced)
    return replace(
        strategy,
        transforms=(divide, *strategy.transforms),
        layout=layout if stages is None else StageLayout(layout, stages),
        guards=(*strategy.guards, WholeWeightsGuard(layout)),
    )


def refuse_divided_sequences(context: Context) -> None:
    """Refuse to divide the sequences of a model in stages."""
    size = context.ranks("context").size
    divides_between = context.parallelism is not None and context.parallelism.sequence
    if size > 1 or divides_between:
        said = "sequence=True" if divides_between else f"context={size}"
        raise ValueError(
            f"parallel.{said} with parallel.pipeline={context.ranks('pipeline').size}: parts of sequences do not "
            "pass between stages yet; leave one of the two out"
        )


def check_experts(strategy: Strategy, context: Context) -> None:
    """Refuse experts that ranks which divide a layer would hold alike, or that a strategy averages with others."""
    size, num_tensor = context.ranks("expert").size, context.ranks("tensor").size
    if size % num_tensor:
        raise ValueError(
            f"parallel.expert={size} with tensor={num_tensor}: the ranks that divide a layer share its tokens, and "
            f"hold different experts: expert may be a multiple of {num_tensor}"
        )
    if context.parallelism is not None and context.parallelism.sequence:
        raise ValueError(
            f"parallel.expert={size} with parallel.sequence: experts would be given parts of sequences and take "
            "them for the whole; leave one of the two out"
        )
    if size > num_tensor and not strategy.averages_experts:
        raise ValueError(
            f"parallel.expert={size} with tensor={num_tensor}: this backend averages gradients over ranks that then "
            "hold different experts; say backend='fsdp', which averages each over the ranks that hold it"
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
    """Give all ranks rank 0's values, and divide each model: its layers over `tensor`, its experts over `expert`.

    A model stays divided for as long as it lives: `release` changes nothing, and a later `prepare` takes it as it is.

    Attributes:
        divisions: The division of each model's parameters that are divided, by name.
        by_parameter: The division of each of these parameters, as optimizers hold it before `prepare`.
        replaced: The parameters of layers that were on meta, with those that hold values in their place.
    """

    def __init__(self, context: Context) -> None:
        self.divisions = WeakIdKeyDictionary()
        self.by_parameter = WeakIdKeyDictionary()
        self.replaced = WeakIdKeyDictionary()
        self._context = context
        styles = None if context.parallelism is None else context.parallelism.tensor_styles
        planners: dict[View, _Planner] = {
            "tensor": partial(plan_model, styles=styles),
            "expert": plan_experts,
        }
        self._sizes: dict[View, int] = {view: n for view in planners if (n := context.ranks(view).size) > 1}
        self._planners = planners
        self._plans: dict[nn.Module, dict[View, ParallelPlan]] = {}
        self._shown: dict[View, dict[str, str]] = {view: {} for view in self._sizes}
        self._is_between = context.parallelism is not None and bool(context.parallelism.sequence)
        self._between: dict[nn.Module, BetweenPlan] = {}
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
        for optimizer in optimizers if self._sizes else ():
            if is_low_bit(optimizer):
                said = " and ".join(f"{view}={size}" for view, size in self._sizes.items())
                raise ValueError(
                    f"{type(optimizer).__name__} under {said}: blocks of low-bit states cross the parts "
                    "of a weight; use an optimizer with states in floating point"
                )
        for model in models:
            plans: dict[View, ParallelPlan] = {}
            for view, size in self._sizes.items() if self._find(model) is None else ():
                plans[view] = self._planners[view](unwrap_compiled(model), size)
            names = {layer.name for plan in plans.values() for layer in plan.layers}
            for view, plan in plans.items():  # what one view leaves, another may divide
                left = {name: reason for name, reason in plan.left.items() if name not in names}
                plans[view] = replace(plan, left=left)
            self._plans[model] = plans
            if self._is_between and "tensor" in plans and plans["tensor"].layers:
                self._between[model] = plan_between_layers(unwrap_compiled(model), plans["tensor"])
        are_divided = any(plan.layers for plans in self._plans.values() for plan in plans.values())
        if are_divided or any(self.divisions.values()):
            for optimizer in optimizers:
                check_steps_parts(optimizer, self._context, num_ranks=max(self._sizes.values()))

    def apply(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's values, and divide a model that is not divided yet. Called on all ranks."""
        inner, known = unwrap_compiled(model), self._find(model)
        if known is not None:
            self.divisions[model] = known
            return model
        plans, divisions = self._plans.pop(model, {}), dict[str, TensorDivision]()
        for view, plan in plans.items():
            divisions |= self._divide(inner, view, plan)
            self._show(inner, view, plan)
        tensors = (*inner.parameters(), *inner.buffers())
        self._broadcast(one for one in tensors if one not in self.by_parameter)
        if (between := self._between.pop(model, None)) is not None:
            ranks = self._group_ranks("tensor", host=self._meetings)
            divide_between_layers(inner, between, ranks, device=self._context.device)
        if "tensor" in plans and any(plan.layers for plan in plans.values()):
            compare_first_input(inner, self._context, over="tensor")
            # Outside divided layers these ranks drop the same elements, and inside each draws its own.
            synchronize_rng_states(self._context, ("torch", "accelerator"), over="tensor")
        self.divisions[model] = divisions
        return model

    def fail(self, error: BaseException) -> None:
        """Note in `error` that models may be divided by now."""
        if self._sizes:
            error.add_note("prepare() failed: models may hold this rank's part of their layers by now")

    def applied(self) -> Mapping[str, object]:
        """Return what is divided, in words."""
        said = [
            f"among {self._sizes[view]} ranks ({view}): "
            + "; ".join(f"{kind}: {layers}" for kind, layers in shown.items())
            for view, shown in self._shown.items()
            if shown
        ]
        return {"divided": ", and ".join(said)} if said else {}

    def _divide(self, model: nn.Module, view: View, plan: ParallelPlan) -> dict[str, TensorDivision]:
        """Divide a model; each region is given its values just before, if it was on meta."""
        parameters = [parameter for _, parameter, _ in named_cuts(model, plan)]
        seed = self._seed() if any(parameter.is_meta for parameter in parameters) else 0
        ranks = self._group_ranks(view, host=self._meeting_place(plan))
        alike = self._group_ranks("tensor") if view == "expert" and "tensor" in self._sizes else None
        found: dict[str, TensorDivision] = {}

        def give_values(part: ParallelPlan) -> None:
            self._fill(model, part, seed)
            self._broadcast(parameter for _, parameter, _ in named_cuts(model, part))

        check_same_plan(plan, model, self._context, over=view)
        divide_model(model, plan, ranks, device=self._context.device, alike=alike, before=give_values)
        for name, parameter, cut in named_cuts(model, plan):
            division = TensorDivision(cut=cut, ranks=self._context.ranks(view))
            found[name] = self.by_parameter[parameter] = division
        return found

    def _seed(self) -> int:
        """Return rank 0's next seed. Called on all ranks."""
        return broadcast_object(self._context, int(torch.randint(2**31, ()).item()))

    def _group_ranks(self, view: View, *, host: ProcessGroup | None = None) -> GroupRanks:
        group = self._context.ranks(view).process_group
        assert group is not None  # of several ranks
        return GroupRanks(group, host=host)

    def _meeting_place(self, plan: ParallelPlan) -> ProcessGroup | None:
        """Return a group where a rank waits that asks alone for whole logits. Called on all ranks."""
        if self._meetings is None and any(layer.style == "vocabulary_column" for layer in plan.layers):
            self._meetings = self._context.ranks("tensor").new_group(backend="gloo")
            self._context.before_close(partial(end_group, self._meetings.group_name))
        return self._meetings

    def _find(self, model: nn.Module) -> Mapping[str, TensorDivision] | None:
        """Return the divisions of a model that an earlier `prepare` divided, compiled or not."""
        inner = unwrap_compiled(model)
        return next(
            (found for other, found in self.divisions.items() if unwrap_compiled(other) is inner), None
        )

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks rank 0's values of tensors that have values."""
        parts = [part for one in tensors if not one.is_meta for part in parts_of(one)]
        broadcast_parts(parts, self._context, over="world")

    def _fill(self, model: nn.Module, plan: ParallelPlan, seed: int) -> None:
        """Give layers on meta their values before they are divided: those that they have on one rank."""
        layers = [model.get_submodule(layer.name) for layer in plan.layers if layer.cuts]
        on_meta = [one for one in layers if any(p.is_meta for p in one.parameters(recurse=False))]
        names = {module: name for name, module in model.named_modules()} if on_meta else {}
        around = [one for one in model.modules() if callable(getattr(one, "_init_weights", None))]
        for layer in on_meta:
            before = dict(layer.named_parameters(recurse=False))
            empty = replace_meta_tensors([layer], lambda p: torch.empty_like(p, device=self._context.device))
            self.replaced.update({p: getattr(layer, name) for name, p in before.items() if p.is_meta})
            initialise(empty, names, around[:1], seed)

    def _show(self, model: nn.Module, view: View, plan: ParallelPlan) -> None:
        """Remember for the plan, and log once, what is divided and what is left."""
        kind = type(model).__name__
        sources = ", ".join(sorted(set(plan.sources.values()))) or "none"
        said = f"{format_count(len(plan.layers), 'layer')}{_KINDS[view]} ({sources})"
        self._shown[view][kind] = f"{said}, left: {_patterns(plan.left)}" if plan.left else said
        if self._context.topology.is_main and not plan.layers:
            logger.warning(
                "%s=%d: no layer%s of %s can be divided; each of these ranks computes the whole of it",
                view,
                plan.size,
                _KINDS[view],
                kind,
            )
        elif self._context.topology.is_main:
            logger.info("%s among %d ranks: %s", kind, plan.size, self._shown[view][kind])
            for name, reason in plan.left.items():
                logger.debug("%s stays whole: %s", name, reason)


def _patterns(names: Iterable[str]) -> str:
    """Return the names of modules in few words: `*` stands for a number, and all that are alike are one."""
    patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    more = f" and {len(patterns) - _MOST_LEFT} more" if len(patterns) > _MOST_LEFT else ""
    return ", ".join(patterns[:_MOST_LEFT]) + more
