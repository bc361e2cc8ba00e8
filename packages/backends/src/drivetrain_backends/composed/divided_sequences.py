"""Context parallelism for any strategy: ranks compute parts of each sequence, and average gradients as replicas."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from drivetrain_backends.compat import tree_leaves
from drivetrain_backends.composed.strategy import ModelTransform
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.replicated_weights import checksum
from drivetrain_messages import format_count
from drivetrain_parallel import (
    GroupRanks,
    SequencePlan,
    divide_sequences,
    has_divided_layers,
    has_divided_sequences,
    plan_sequences,
)
from drivetrain_state import Context, gather_object, synchronize_rng_states
from drivetrain_state.mesh import View
from drivetrain_state.rank_group import end_group

logger = logging.getLogger(__name__)


class DivideSequences(ModelTransform):
    """Have the blocks of each model compute on this rank's part of the sequences that it is called with.

    Parameters stay whole. A model stays divided for as long as it lives: `release` changes nothing, and a later
    `prepare` takes it as it is.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ranks = context.ranks("context")
        self._method = None if context.parallelism is None else context.parallelism.context_method
        self._divided = WeakSet[nn.Module]()
        self._plans: dict[nn.Module, SequencePlan] = {}
        self._shown: dict[str, str] = {}
        self._meetings: ProcessGroup | None = None

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Plan the division of new models' sequences; refuse models whose sequences cannot be divided.

        A model without a stack of blocks stays whole beside one that has it, as a discriminator may.

        Raises:
            ValueError: No model has a stack of blocks, or one cannot be divided or is divided already.
        """
        del optimizers
        self._plans.clear()
        for model in map(unwrap_compiled, models):
            if model not in self._divided:
                is_whole = self._context.ranks("tensor").size == self._context.ranks("expert").size == 1
                refuse_divided(model, layers=is_whole)
                self._plans[model] = plan_sequences(model, self._ranks.size, self._method)
        if self._plans and not self._shown and not any(plan.blocks for plan in self._plans.values()):
            kinds = ", ".join(dict.fromkeys(type(model).__name__ for model in self._plans))
            raise ValueError(
                f"parallel.context={self._ranks.size}: {kinds} has no nn.ModuleList or nn.Sequential of blocks of "
                "one class, between which sequences could stay divided: leave parallel.context out, or prepare() "
                "it together with a model that has them"
            )

    def apply(self, model: nn.Module) -> nn.Module:
        """Divide the sequences of a model that is not divided yet. Called on all ranks."""
        inner = unwrap_compiled(model)
        if (plan := self._plans.pop(inner, None)) is not None:
            check_same_plan(plan, inner, self._context, over="context")
            kind = type(inner).__name__
            if plan.blocks:
                group = self._ranks.process_group
                assert group is not None  # of several ranks
                ranks = GroupRanks(group, host=self._meeting_place())
                divide_sequences(inner, plan, ranks, device=self._context.device)
                self._shown[kind] = format_count(len(plan.blocks), "block")
            elif self._context.topology.is_main:
                said = "context=%d: %s has no blocks to divide; each of these ranks computes the whole of it"
                logger.warning(said, plan.size, kind)
            compare_first_input(inner, self._context, over="context")
            # Outside of the blocks these ranks drop the same elements, and inside each draws its own.
            synchronize_rng_states(self._context, ("torch", "accelerator"), over="context")
            self._divided.add(inner)
        return model

    def _meeting_place(self) -> ProcessGroup:
        """Return a group where a rank waits that asks alone for what ranks hold parts of. Called on all ranks."""
        if self._meetings is None:
            self._meetings = self._ranks.new_group(backend="gloo")
            self._context.before_close(partial(end_group, self._meetings.group_name))
        return self._meetings

    def applied(self) -> Mapping[str, object]:
        """Return whose sequences are divided, in words."""
        said = "; ".join(f"{kind}: {blocks}" for kind, blocks in self._shown.items())
        return {"divided_sequences": f"among {self._ranks.size} ranks: {said}"} if said else {}


def refuse_divided(model: nn.Module, *, layers: bool = True) -> None:
    """Refuse a model whose sequences, or `layers`, other ranks divide: this rank's parts would be taken for whole."""
    if (layers and has_divided_layers(model)) or has_divided_sequences(model):
        raise ValueError(
            f"{type(unwrap_compiled(model)).__name__} is divided already, by another Accelerator: build it anew, "
            "whole; prepare() divides it as the section parallel says"
        )


def check_same_plan(plan: object, model: nn.Module, context: Context, *, over: View) -> None:
    """Refuse a model of which ranks have different plans, as of models that are not equal. Called on all of them."""
    if any(other != plan for other in gather_object(context, plan, over=over)):
        ranks = ", ".join(map(str, context.ranks(over).ranks))
        raise ValueError(
            f"ranks {ranks} would divide {type(model).__name__} in different ways: build the same model on all of "
            "them, with the same versions of its libraries"
        )


def compare_first_input(model: nn.Module, context: Context, *, over: View) -> None:
    """Have the first call of a divided model refuse inputs that differ among the ranks that divide it.

    Each of them computes a part of one output: with other batches, what they join is the output of none.
    """

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        own = [(tuple(leaf.shape), int(checksum(leaf))) for leaf in given]
        found = gather_object(context, own, over=over)
        if any(other != found[0] for other in found):
            ranks = ", ".join(map(str, context.ranks(over).ranks))
            raise ValueError(
                f"ranks {ranks} divide {type(model).__name__}, and were given different inputs: prepare() the "
                "loader, which gives these ranks the same batches, or read the same on all of them"
            )

    eager: Any = torch.compiler.disable(compare)  # it gathers objects, and reads values
    handle = model.register_forward_pre_hook(eager, prepend=True, with_kwargs=True)
