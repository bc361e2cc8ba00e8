"""The memory of a device by component, for a choice. Pure."""

from dataclasses import dataclass

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.model_figures import ModelFigures

_NUM_GATHERED = 2  # blocks: the one that computes, and the next, which is gathered ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The bytes of a device where a step holds the most, by what they are; they add up to that peak.

    Attributes:
        weights: Parameters and buffers.
        gradients: The gradients that exist at the peak.
        states: The states of the optimizer.
        activations: The results that the forward leaves for the backward, and the batch.
        temporary: Gathered blocks, and results between operations.
    """

    weights: float
    gradients: float
    states: float
    activations: float
    temporary: float

    @property
    def peak(self) -> float:
        """The most bytes that a step holds at once."""
        return self.weights + self.gradients + self.states + self.activations + self.temporary


def at_peak(figures: StepFigures, *, lasting: float = 0, in_flight: int = 1) -> DeviceMemory:
    """Return the memory of the phase that holds the most.

    Args:
        figures: The figures of the rank's step.
        lasting: The bytes of gradients that exist before the last micro-batch; see `lasting_gradients`.
        in_flight: The number of micro-batches whose activations a stage of a pipeline holds.
    """
    more = (in_flight - 1) * figures.activations
    # Each phase: what it holds beside weights and states, the gradients and the activations among it.
    if lasting:
        phases = [(figures.computing + lasting + more, lasting, figures.activations + more)]
    else:
        phases = [
            (figures.forward, 0.0, figures.activations),
            (figures.early, 0.0, figures.activations),
            (figures.late, figures.gradients, 0.0),
        ]
    phases.append((figures.stepping, figures.gradients, 0.0))
    most, gradients, activations = max(phases)
    gradients = min(gradients, most)
    activations = min(activations, most - gradients)
    return DeviceMemory(
        weights=figures.weights,
        gradients=gradients,
        states=figures.states,
        activations=activations + figures.inputs,
        temporary=most - gradients - activations,
    )


def lasting_gradients(choice: PlanChoice, figures: StepFigures) -> float:
    """Return the bytes of gradients that exist before the backward of a step's last micro-batch.

    DDP's buckets last; what earlier micro-batches add up stands beside them. FSDP adds whole gradients up, and
    reduces them with the last micro-batch.
    """
    accumulates = choice.accumulation > 1
    if choice.in_buckets:
        return figures.gradients * (2 if accumulates else 1)
    if choice.by_blocks and choice.pipeline == 1:
        return figures.gradients * choice.num_dividing if accumulates else 0.0
    return figures.gradients if accumulates else 0.0


def figures_of_rank(
    model: ModelFigures, choice: PlanChoice, divided: StepFigures | None = None
) -> StepFigures:
    """Return the figures of a rank by arithmetic: layers and sequences divided, parameters sharded, stages apart.

    `divided` are those of `model.of`, where they are known.
    """
    found = model.of(choice) if divided is None else divided
    is_fsdp = choice.by_blocks
    whole = found.weights * (2 if is_fsdp else 1)  # bytes of the parameters that ranks divide
    share = whole / max(1.0, model.plain.first.weights)
    outside, block = model.outside_weights * share, model.block_weights * share
    if choice.pipeline > 1:
        stage = min(1.0, (outside + (whole - outside) / choice.pipeline) / whole)
        found, whole = found.scaled(stage), whole * stage
    if choice.expert > 1:
        # The experts of a block become fewer; ranks shard those that they hold alike.
        kept = 1 - model.expert_weights * share / model.plain.first.weights * (1 - 1 / choice.expert)
        block *= kept
    if is_fsdp:
        return _sharded(model, choice, found, whole, outside, block)
    if choice.strategy == "none":
        return found
    return divided_by_stage(choice, found, block)


def _sharded(
    model: ModelFigures, choice: PlanChoice, half: StepFigures, whole: float, outside: float, block: float
) -> StepFigures:
    """Return the figures of one of the ranks that FSDP shards over, from those of one of two."""
    scale = 2 / choice.num_dividing
    gradients = half.gradients * scale
    kept = 0.0  # gathered all the time, beyond two blocks and what is outside of blocks
    if choice.strategy == "shard_grad_op":
        kept = max(0.0, model.gathered_share * (whole - outside - _NUM_GATHERED * block))
    return half.changed(
        weights=half.weights * scale,
        gradients=gradients,
        states=half.states * scale,
        forward=half.forward + kept,
        early=half.computing + kept,
        late=half.late - half.gradients + gradients + kept,
        computing=half.computing + kept,
        stepping=half.stepping * scale,
        stepped=half.stepped * scale,
    )


def divided_by_stage(choice: PlanChoice, found: StepFigures, block: float) -> StepFigures:
    """Return the figures of one of the ranks among which DeepSpeed divides what its stage says.

    `found` are those of one device, and `block` the bytes of the largest block's parameters.
    """
    ranks = choice.num_dividing
    divides_weights, divides_gradients = choice.strategy == "zero3", choice.strategy != "zero1"
    weights = found.weights / ranks if divides_weights else found.weights
    gradients = found.gradients / ranks if divides_gradients else found.gradients
    gathered = _NUM_GATHERED * block if divides_weights else 0.0
    reduced = block if divides_gradients else 0.0
    return found.changed(
        weights=weights,
        gradients=gradients,
        states=found.states / ranks,
        forward=found.forward + gathered,
        early=found.computing + gathered + reduced,
        late=found.late - found.gradients + gradients + gathered + reduced,
        computing=found.computing + gathered + reduced,
        stepping=gradients + (found.stepping - found.gradients) / ranks,
        stepped=found.stepped / ranks,
    )


def memory_of(choice: PlanChoice, figures: StepFigures) -> DeviceMemory:
    """Return the memory of a device; what is offloaded is not on it."""
    in_flight = min(choice.accumulation, choice.pipeline)
    lasting = lasting_gradients(choice, figures)
    if choice.offload != "none":  # the host keeps the states, and steps the optimizer
        figures = figures.changed(states=0, stepping=0)
        if choice.strategy != "zero2":  # which keeps weights and gradients on the device
            late = max(0.0, figures.late - figures.gradients)
            figures = figures.changed(weights=0, gradients=0, late=late)
            lasting = lasting if choice.by_blocks else 0.0
    return at_peak(figures, lasting=lasting, in_flight=in_flight)
