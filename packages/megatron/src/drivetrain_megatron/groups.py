"""Megatron's parallel state, made of our mesh: its groups hold the same ranks as ours, or it is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_megatron.compat import is_alive, own_groups
from drivetrain_megatron.library import model_parallel_cuda_manual_seed, parallel_state
from drivetrain_state import Context, barrier, broadcast_object
from drivetrain_state.mesh import View

# Innermost first, as Megatron writes what drivetrain_state.mesh.AXES lists outermost first.
_ORDER = "tp-cp-ep-dp-pp"


def check_axes(context: Context) -> None:
    """Refuse a mesh with axes that models of Megatron's layers are not divided along here."""
    instead: Mapping[View, str] = {
        "shard": "Megatron's layers are trained as replicas: say data in its place",
        "context": "attention over divided sequences comes with Transformer Engine, which is not used yet",
        "expert": "experts are divided by tensor alone yet",
    }
    for view, reason in instead.items():
        if (size := context.ranks(view).size) > 1:
            raise ValueError(f"parallel.{view}={size} under backend='megatron': {reason}")


def open_parallel_state(context: Context) -> None:
    """Give Megatron the groups of a mesh, until the context is closed. Called on all ranks.

    Groups that exist already, of another backend of this mesh or of the program's own, are taken as they are.

    Raises:
        RuntimeError: Megatron's groups hold other ranks than the mesh, such as those of an earlier backend.
    """
    if not all(map(is_alive, own_groups())):  # of a default group that has ended
        close_parallel_state()
    is_new = not parallel_state.is_initialized()
    if is_new:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=context.ranks("tensor").size,
            pipeline_model_parallel_size=context.ranks("pipeline").size,
            order=_ORDER,
            create_gloo_process_groups=context.device.type == "cuda",
        )
        barrier(
            context
        )  # a rank that destroyed its groups now would cut off others, which still connect to it
        context.before_close(close_parallel_state)
    check_same_groups(context)
    if is_new and context.device.type == "cuda":
        seed_trackers(context)


def close_parallel_state() -> None:
    """Destroy Megatron's groups, if there are any. Called on all ranks."""
    if not parallel_state.is_initialized():
        return
    groups = own_groups()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if is_alive(group):
            dist.destroy_process_group(group)


def check_same_groups(context: Context) -> None:
    """Refuse groups of Megatron that hold other ranks than those of the mesh."""
    found: Mapping[View, Any] = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "counts": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    for view, group in found.items():
        theirs: Sequence[int] = dist.get_process_group_ranks(group)
        if (ours := context.ranks(view).ranks) != tuple(theirs):
            raise RuntimeError(
                f"Megatron's groups hold the ranks {list(theirs)} along {view!r}, and the mesh {list(ours)}: close "
                "the Accelerator that made them first, or leave initialize_model_parallel() to backend='megatron'"
            )


def seed_trackers(context: Context) -> None:
    """Seed the numbers that Megatron's layers draw where ranks hold parts: other ones on each rank.

    Megatron adds the place among ranks of `tensor`. Outside of these, ranks draw from torch's generator, which keeps
    its state.
    """
    seed = broadcast_object(context, torch.initial_seed() % 2**31)
    state = torch.cuda.get_rng_state(context.device)
    place = context.ranks("reads").index * context.ranks("pipeline").size + context.ranks("pipeline").index
    model_parallel_cuda_manual_seed(seed + 100_003 * place)
    torch.cuda.set_rng_state(state, context.device)
