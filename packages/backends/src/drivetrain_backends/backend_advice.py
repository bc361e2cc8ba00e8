"""The questions of `drivetrain config` about the chosen backend, with recommended answers; torch is not imported."""

from collections.abc import Callable, Mapping
from typing import Any

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


def _always(value: object, why: str, text: str, choices: Mapping[str, str] | None = None) -> Ask:
    """Return a question that is asked whatever is known."""
    return lambda _: {"value": value, "why": why, "text": text, **({"choices": choices} if choices else {})}


ask_strategy = _always(
    "full_shard",
    "it saves the most memory, and prefetching hides most of its traffic within a machine",
    "What does each rank keep of the model?",
    {
        "full_shard": "a shard of parameters, gradients and optimizer states",
        "shard_grad_op": "parameters whole between forward and backward: less traffic, more memory",
        "hybrid_shard": "shards within each machine, replicas across: for slow networks",
        "no_shard": "everything, as with replicas",
    },
)
ask_offload = _always(
    False,
    "a step that waits for the host's memory is several times slower; say yes if shards do not fit",
    "Keep shards and optimizer states in host memory between uses?",
)
