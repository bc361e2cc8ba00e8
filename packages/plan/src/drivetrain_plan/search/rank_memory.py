"""The memory of a training step on each rank, from its memory on one device. Pure."""

from dataclasses import dataclass
from math import ceil

from drivetrain_plan.program.step_memory import StepMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParts:
    """The parts of the memory that the ranks divide among themselves; every rank holds the other parts whole."""

    divides_states: bool = True
    divides_gradients: bool = True
    divides_weights: bool = True


SHARDINGS = {
    "ddp": ShardedParts(divides_states=False, divides_gradients=False, divides_weights=False),
    "zero1": ShardedParts(divides_gradients=False, divides_weights=False),
    "zero2": ShardedParts(divides_weights=False),
    "zero3": ShardedParts(),
    "fsdp": ShardedParts(),
}
# Blocks whose weights are gathered at once: the one that computes, and the next, which is prefetched.
_NUM_GATHERED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank, in bytes."""

    weights: int
    gradients: int
    optimizer_states: int
    gathered: int  # the bytes of blocks that are gathered for computing, and of the gradients of one of them
    activations: int
    peak: int  # the most bytes that are allocated at once in a step; at most the sum of what each phase holds


def memory_of_rank(
    step: StepMemory, *, sharding: ShardedParts, world_size: int, largest_block_bytes: int
) -> RankMemory:
    """Return the memory of a rank among `world_size` ranks, from a step with its batch on a single device."""
    divided = sharding if world_size > 1 else SHARDINGS["ddp"]
    weights = _part(step.weights, world_size) if divided.divides_weights else step.weights
    gradients = _part(step.gradients, world_size) if divided.divides_gradients else step.gradients
    states = _part(step.optimizer_states, world_size) if divided.divides_states else step.optimizer_states
    gathered = _NUM_GATHERED * largest_block_bytes if divided.divides_weights else 0
    if divided.divides_gradients and step.weights:
        gathered += int(largest_block_bytes * step.gradients / step.weights)
    computing = weights + gradients + states + gathered + step.computing
    stepping = weights + gradients + states + _part(step.stepping, world_size)
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer_states=states,
        gathered=gathered,
        activations=step.activations,
        peak=max(computing, stepping) if divided.divides_states else step.peak,
    )


def _part(size_bytes: int, world_size: int) -> int:
    return ceil(size_bytes / world_size)
