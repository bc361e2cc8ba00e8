"""Run inference through a model whose stages the ranks hold: `prepare_pippy`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal

from torch import nn

from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_accelerate.tensors.nested_tensors import concatenate, send_to_device
from drivetrain_backends.composed.stages import KeepStages, cut_batch
from drivetrain_parallel.layers.divided_layers import with_forward
from drivetrain_state import ParallelDims, broadcast_object


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Divide a model into stages, one for each rank, in place; its forward passes through all of them.

    Called on all ranks, with a model on the CPU, as are calls of the model. A call cuts the first rank's batch into
    `num_chunks`, by default one for each rank, which run through the stages at a time. It returns the joined output
    on the last rank, or with `gather_output` on all, and else None.

    `split_points` has the names of the blocks that begin a stage, but the first; "auto" balances the stages. Classes
    of blocks and examples of arguments are not needed: no block is ever divided, and batches may have any shape. A
    ParallelPlanError says that the model has no list of blocks, or fewer of them than ranks.
    """
    context = current_context()
    if (size := context.topology.world_size) < 2:
        return model.to(context.device)
    splits = None if split_points == "auto" else tuple(split_points)
    dims = ParallelDims(pipeline=size, pipeline_splits=splits)
    stages = KeepStages(replace(context, parallelism=dims, plan=dims.plan(size), _ranks={}))
    stages.plan([model], [])
    # The keys and values of one stage would reach no other.
    keeps_none = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    staged = stages.models[stages.apply(model).to(context.device)]

    def forward(model: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if staged.runner.model.is_running:
            return whole(model, *args, **kwargs)
        batch = send_to_device((args, {**keeps_none, **kwargs}), context.device)
        pieces = [
            partial(model.forward, *args, **kwargs)
            for (args, kwargs), _ in cut_batch(batch, num_chunks or size)
        ]
        found = concatenate(staged.runner.evaluate(pieces))
        if gather_output:
            return stages.share(found, staged)
        return found if context.topology.rank == size - 1 else None

    def take_first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Ranks need not have the same batch, as under Accelerate.
        return broadcast_object(context, (args, kwargs))

    model.register_forward_pre_hook(take_first, prepend=True, with_kwargs=True)
    with_forward(model, forward)
    return model
