"""The memory of a training step on each rank, from that on one device. Pure."""

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

from drivetrain_dispatch.estimate.step_memory import StepMemory

# What the ranks divide among themselves: nothing (ddp), optimizer states (zero1), gradients too (zero2), or weights
# as well (zero3, and fsdp, whose blocks are gathered one after another).
Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
# Blocks whose weights are gathered at once: the one that computes, and the next, which is prefetched.
_NUM_GATHERED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank, in bytes.

    Attributes:
        weights: The bytes of the rank's weights between steps.
        gradients: The bytes of its gradients after a backward.
        optimizer_states: The bytes of its optimizer states.
        gathered: The bytes of blocks that are gathered for computing, and of the gradients of one of them.
        activations: The bytes that the forward leaves for the backward.
        peak: The most bytes that are allocated at once in a step; at most the sum of what each phase holds.
    """

    weights: int
    gradients: int
    optimizer_states: int
    gathered: int
    activations: int
    peak: int


def memory_of_rank(
    step: StepMemory, *, sharding: Sharding, world_size: int, largest_block_bytes: int
) -> RankMemory:
    """Return the memory of one of `world_size` ranks.

    Args:
        step: The memory of the step of one rank's batch, on one device that holds all.
        sharding: What the ranks divide.
        world_size: The number of ranks.
        largest_block_bytes: The bytes of the weights of the largest block that is gathered as a whole.
    """
    if sharding == "ddp" or world_size == 1:
        return RankMemory(
            weights=step.weights,
            gradients=step.gradients,
            optimizer_states=step.optimizer_states,
            gathered=0,
            activations=step.activations,
            peak=step.peak,
        )
    divides_weights = sharding in ("zero3", "fsdp")
    weights = _part(step.weights, world_size) if divides_weights else step.weights
    gradients = step.gradients if sharding == "zero1" else _part(step.gradients, world_size)
    states = _part(step.optimizer_states, world_size)
    share_of_gradients = step.gradients / step.weights if step.weights else 0
    block_gradients = 0 if sharding == "zero1" else int(largest_block_bytes * share_of_gradients)
    gathered = block_gradients + (_NUM_GATHERED * largest_block_bytes if divides_weights else 0)
    computing = weights + gradients + states + gathered + step.computing
    stepping = weights + gradients + states + _part(step.stepping, world_size)
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer_states=states,
        gathered=gathered,
        activations=step.activations,
        peak=max(computing, stepping),
    )


def _part(size_bytes: int, world_size: int) -> int:
    return ceil(size_bytes / world_size)
