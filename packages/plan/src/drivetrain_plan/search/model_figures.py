"""The figures of a model by batch, checkpointing and division, from a few runs of its program. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from drivetrain_plan.choice import Checkpointing, PlanChoice
from drivetrain_plan.program.figures import StepFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """The figures of one device's step, for one sample and for each further one."""

    first: StepFigures
    further: StepFigures

    def of(self, batch_size: int) -> StepFigures:
        """Return the figures of a batch."""
        return self.first.plus(self.further, times=batch_size - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """The facts of a model: its figures on one device, and how these change with each division.

    Attributes:
        name: The model's name.
        num_parameters: The number of its parameters.
        num_tokens: The number of tokens of a sample.
        num_blocks: The number of its blocks, among which a pipeline divides.
        block_weights: The bytes of the parameters of its largest block.
        outside_weights: The bytes of parameters outside all blocks, which FSDP shards with the root.
        gathered_share: The share of weights' bytes that FSDP gathers: less than 1 where it casts them before.
        plain: The figures of one device.
        sharded: The figures of one of two ranks that FSDP shards it over, by kind of checkpointing.
        unsharded: The figures of one device by kind of checkpointing, where it needs no FSDP.
        halves: For each axis that divides the model, the figures of its program among two ranks, for one sample.
        tensor_sizes: The numbers of ranks that can divide its layers.
        num_experts: The number of experts of a block; 0 without.
        expert_weights: The bytes of the parameters of all experts.
        ties_weights: Whether two of its modules share a parameter.
        basis: "program" where the figures were counted, "formula" where they follow from sizes alone.
        why: The reason for a formula.
    """

    name: str
    num_parameters: int
    num_tokens: int
    num_blocks: int
    block_weights: float
    outside_weights: float
    gathered_share: float = 1
    plain: BatchFigures
    sharded: Mapping[Checkpointing, BatchFigures]
    unsharded: Mapping[Checkpointing, BatchFigures] = field(default_factory=dict[Checkpointing, BatchFigures])
    halves: Mapping[str, StepFigures] = field(default_factory=dict[str, StepFigures])
    tensor_sizes: tuple[int, ...] = (1,)
    num_experts: int = 0
    expert_weights: float = 0
    ties_weights: bool = False
    basis: str = "program"
    why: str = ""

    def of(self, choice: PlanChoice) -> StepFigures:
        """Return the figures of a rank that divides layers and sequences as a choice does, and no parameters.

        Each figure consists of a part that ranks divide and one that each of them has: two runs tell them apart.
        Under FSDP they are those of one of two ranks.
        """
        by_kind = self.sharded if choice.by_blocks else {"none": self.plain, **self.unsharded}
        found, whole = by_kind[choice.checkpointing].of(choice.micro_batch), self.plain.first
        axis = "tensor and sequence" if choice.sequence else "tensor"
        for name, size in ((axis, choice.tensor), ("context", choice.context)):
            if size > 1:
                found = _divided(found, whole, self.halves[name], size, choice.micro_batch)
        return found


def _divided(
    figures: StepFigures, whole: StepFigures, half: StepFigures, size: int, batch_size: int
) -> StepFigures:
    changed: dict[str, float] = {}
    for each in fields(StepFigures):
        value, before, after = (getattr(one, each.name) for one in (figures, whole, half))
        if isinstance(value, float | int):
            divided = min(1.0, max(0.0, 2 * (1 - after / before))) if before else 0.0
            changed[each.name] = value * (1 - divided + divided / size)
    payloads = {**figures.payloads}
    calls = {**figures.calls}
    for key, payload in half.payloads.items():
        if key not in whole.payloads:
            payloads[key] = payloads.get(key, 0) + payload * batch_size
            calls[key] = calls.get(key, 0) + half.calls[key]
    return replace(figures, **changed, payloads=payloads, calls=calls)
