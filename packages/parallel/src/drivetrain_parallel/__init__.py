"""Divide the layers, the sequences or the experts of a PyTorch model among ranks, by a plan that is tried.

`plan_model(model, size)` chooses layers by given patterns, by the plan that a model of transformers brings, or by
their sizes, and tries each region on threads that stand for ranks. `divide_model(model, plan, ranks)` cuts the
parameters of one rank, in place. `plan_experts(model, size)` plans the experts of a model, which ranks hold some of.
`plan_sequences(model, size)` finds the blocks that compute on parts of sequences; `divide_sequences` divides them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_parallel.errors import ParallelPlanError as ParallelPlanError
    from drivetrain_parallel.layers.apply import divide_model as divide_model
    from drivetrain_parallel.layers.apply import expert_counts as expert_counts
    from drivetrain_parallel.layers.apply import has_divided_layers as has_divided_layers
    from drivetrain_parallel.layers.apply import named_cuts as named_cuts
    from drivetrain_parallel.layers.apply import part_of as part_of
    from drivetrain_parallel.layers.divided_layers import holds_experts as holds_experts
    from drivetrain_parallel.plan import AttributeChange as AttributeChange
    from drivetrain_parallel.plan import Cut as Cut
    from drivetrain_parallel.plan import LayerPlan as LayerPlan
    from drivetrain_parallel.plan import ParallelPlan as ParallelPlan
    from drivetrain_parallel.planning.plans import plan_experts as plan_experts
    from drivetrain_parallel.planning.plans import plan_model as plan_model
    from drivetrain_parallel.ranks import GroupRanks as GroupRanks
    from drivetrain_parallel.ranks import TensorRanks as TensorRanks
    from drivetrain_parallel.sequences.between_layers import BetweenPlan as BetweenPlan
    from drivetrain_parallel.sequences.between_layers import divide_between_layers as divide_between_layers
    from drivetrain_parallel.sequences.between_layers import plan_between_layers as plan_between_layers
    from drivetrain_parallel.sequences.block_stack import has_divided_sequences as has_divided_sequences
    from drivetrain_parallel.sequences.blocks import SequencePlan as SequencePlan
    from drivetrain_parallel.sequences.blocks import divide_sequences as divide_sequences
    from drivetrain_parallel.sequences.blocks import plan_sequences as plan_sequences

# Module -> its public names.
_NAMES = {
    "errors": "ParallelPlanError",
    "layers.apply": "divide_model expert_counts has_divided_layers named_cuts part_of",
    "layers.divided_layers": "holds_experts",
    "plan": "AttributeChange Cut LayerPlan ParallelPlan",
    "planning.plans": "plan_experts plan_model",
    "ranks": "GroupRanks TensorRanks",
    "sequences.between_layers": "BetweenPlan divide_between_layers plan_between_layers",
    "sequences.block_stack": "has_divided_sequences",
    "sequences.blocks": "SequencePlan divide_sequences plan_sequences",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
