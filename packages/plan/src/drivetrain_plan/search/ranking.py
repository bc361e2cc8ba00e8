"""The table of plans: each with its memory, traffic and time, the best first; and those that do not fit. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import floor, log

from drivetrain_messages import format_size
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.hardware import RunHardware
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.candidates import TrainingJob, candidates
from drivetrain_plan.search.memory import DeviceMemory, figures_of_rank, memory_of
from drivetrain_plan.search.model_figures import ModelFigures
from drivetrain_plan.search.step_time import StepTime, Traffic, step_time, traffic_of

SPARE = 0.1  # of a device's memory, for allocators and libraries
_ALIKE = 1.05  # times whose ratio is below it are a tie
_STRATEGIES = ("none", "shard_grad_op", "full_shard", "zero1", "zero2", "zero3")
MOST_REJECTED = 12  # plans that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A plan: a choice with what it is predicted to take.

    Attributes:
        choice: The way to train.
        memory: The memory of the fullest device, by component.
        traffic: The collectives of a rank in an optimizer step.
        time: The time of an optimizer step.
        basis: "program" where the rank's program was run, "formula" where its figures follow from others.
        why: The reason for its place, or for its rejection.
    """

    choice: PlanChoice
    memory: DeviceMemory
    traffic: Traffic
    time: StepTime
    basis: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """The plans for a model and hardware, the best first, and the nearest of those that do not fit."""

    model: str
    num_parameters: int
    num_tokens: int
    hardware: RunHardware
    job: TrainingJob
    plans: tuple[TrainingPlan, ...]
    rejected: tuple[TrainingPlan, ...] = ()
    why_formula: str = ""  # the reason for which no program of this model could be run; empty if it was

    @property
    def usable_bytes(self) -> float:
        """The bytes of a device that a plan may take."""
        return self.hardware.memory_bytes * (1 - SPARE)

    def missing(self) -> str:
        """Return, of a table without plans, how much is missing and what would do."""
        nearest = min(self.rejected, key=lambda plan: plan.memory.peak)
        over = nearest.memory.peak - self.usable_bytes
        times = nearest.memory.peak / self.usable_bytes
        return (
            f"{self.model} fits nowhere: the smallest plan, {nearest.choice.name}, needs "
            f"{format_size(int(nearest.memory.peak))} of a device, {format_size(int(over))} more than the "
            f"{format_size(int(self.usable_bytes))} that may be used of it. Take devices with {times:.1f} times the "
            "memory or more of them, shorter samples, a smaller model, or an optimizer that keeps fewer states"
        )


def predict(
    model: ModelFigures,
    choice: PlanChoice,
    hardware: RunHardware,
    *,
    in_half: bool,
    figures: StepFigures,
    basis: str = "formula",
    is_simulated: bool = False,
) -> TrainingPlan:
    """Return a plan, from the figures of its rank; see `step_time`."""
    traffic = traffic_of(model, choice, figures, is_counted=basis == "program")
    return TrainingPlan(
        choice=choice,
        memory=memory_of(choice, figures),
        traffic=traffic,
        time=step_time(model, choice, figures, traffic, hardware, in_half=in_half, is_simulated=is_simulated),
        basis=basis,
    )


def search(
    model: ModelFigures, hardware: RunHardware, job: TrainingJob, *, in_half: bool
) -> tuple[list[TrainingPlan], list[TrainingPlan]]:
    """Return the plans that fit, the best first, each with the micro-batch that is fastest; and the others."""
    usable = hardware.memory_bytes * (1 - SPARE)
    fitting: list[TrainingPlan] = []
    others: list[TrainingPlan] = []
    divided: dict[object, StepFigures] = {}  # what choices share that differ in what shards parameters alone
    for way, (least, *more) in candidates(model, hardware, job):
        best: TrainingPlan | None = None
        # The largest is tried before those between: without accumulation, a step holds fewer gradients.
        for size in (least, *more[-1:], *more[:-1]):
            choice = replace(way, micro_batch=size, accumulation=job.batch // way.num_readers // size)
            parts = (
                choice.by_blocks, choice.tensor, choice.sequence, choice.context, choice.checkpointing,
                choice.micro_batch,
            )  # fmt: skip
            if (known := divided.get(parts)) is None:
                known = divided[parts] = model.of(choice)
            plan = predict(
                model, choice, hardware, in_half=in_half, figures=figures_of_rank(model, choice, known)
            )
            if plan.memory.peak > usable:
                if size == least:
                    others.append(plan)
                elif size != more[-1]:
                    break  # larger ones hold more
            elif best is None or _order(plan, usable) < _order(best, usable):
                best = plan
        if best is not None:
            fitting.append(best)
    kept = {plan.choice.without_batch() for plan in fitting}
    rejected = [plan for plan in others if plan.choice.without_batch() not in kept]
    return ranked(fitting, hardware), sorted(rejected, key=lambda plan: plan.memory.peak)


def ranked(plans: Iterable[TrainingPlan], hardware: RunHardware) -> list[TrainingPlan]:
    """Return plans that fit in the order of preference.

    Plans without offload come first; among them what every device holds whole, if it fits; then the fastest. Among
    plans as fast as each other, the one with fewer dimensions, no recomputation and fewer collectives comes first.
    """
    usable = hardware.memory_bytes * (1 - SPARE)
    return sorted(plans, key=lambda plan: _order(plan, usable))


def _order(plan: TrainingPlan, usable: float) -> tuple[object, ...]:
    choice = plan.choice
    return (
        choice.offload != "none",
        not (_is_whole(choice) and plan.memory.peak <= usable),
        floor(log(plan.time.seconds, _ALIKE)),
        choice.num_dimensions,
        choice.checkpointing != "none",
        _STRATEGIES.index(choice.strategy),
        plan.time.seconds,
    )


def _is_whole(choice: PlanChoice) -> bool:
    """Return whether every device holds and computes the whole model, as DDP has it."""
    return not choice.by_stages and not choice.by_blocks and choice.num_devices == choice.data


def reasons(plans: Sequence[TrainingPlan], rejected: Sequence[TrainingPlan]) -> str:
    """Return why the first plan is the first, in few words."""
    best = plans[0]
    if _is_whole(best.choice):
        return "fits every device whole, with a tenth to spare"
    said = [f"predicted {best.time.seconds:.3g} s a step"]
    if len(plans) > 1:
        second = plans[1]
        ratio = second.time.seconds / best.time.seconds
        said.append(
            f"{second.choice.name} takes {ratio:.2f} times as long"
            if ratio >= _ALIKE
            else f"as fast as {second.choice.name}, and simpler"
        )
    whole = next((one for one in rejected if _is_whole(one.choice)), None)
    if whole is not None:
        said.append(f"{whole.choice.name} needs {format_size(int(whole.memory.peak))}")
    return "; ".join(said)


def why_rejected(plan: TrainingPlan, hardware: RunHardware) -> str:
    """Return why a plan does not fit, in few words."""
    largest = max((each.name for each in fields(DeviceMemory)), key=lambda name: getattr(plan.memory, name))
    usable = format_size(int(hardware.memory_bytes * (1 - SPARE)))
    return f"{format_size(int(plan.memory.peak))} of {usable}, most of it {largest}"
