"""The time of a step, from a rank's figures and the rates of the hardware. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from drivetrain_parallel.stages.schedules import SCHEDULES, Kind, plan_order, simulate
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.hardware import Collective, RunHardware
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.model_figures import ModelFigures
from drivetrain_state.mesh import AXES, VIEWS, View

# How often the whole of a collective passes a rank's link: n ranks pass (n - 1) / n of it each time.
_PASSES: Mapping[Collective, int] = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "send": 1,
}  # fmt: skip
_OF_GRADIENTS: frozenset[tuple[View, Collective]] = frozenset(
    {("fsdp", "reduce_scatter"), ("data", "all_reduce")}
)
# What collectives run beside: each block's gathers beside the block before it; averages of gradients beside the rest
# of the last micro-batch's backward. Those of other views run beside nothing.
_BESIDE: Mapping[View, Literal["blocks", "backward"]] = {
    "fsdp": "blocks", "counts": "backward", "data": "backward",
}  # fmt: skip
_OF_SHARDS: frozenset[View] = frozenset({"fsdp", "data"})  # views that FSDP sends over
_BACKWARD = 2 / 3  # of the operations of forward and backward
_HOST_MEMORY = 50e9  # bytes per second at which a host steps an optimizer whose states it holds
_NVME = 3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of an optimizer step, in seconds, and what it consists of.

    Attributes:
        compute: Matrix products, convolutions and attention.
        memory: Other operations, which wait for the device's memory.
        host: The host's work to issue operations, where a device waits for it.
        exposed: The waits for collectives that nothing overlaps, by view.
        bubble: The waits of a pipeline's stages for each other.
        optimizer: The optimizer's step.
        offload: Transfers from and to the host or the disk.
    """

    compute: float
    memory: float
    host: float = 0
    exposed: Mapping[View, float]
    bubble: float = 0
    optimizer: float = 0
    offload: float = 0

    @property
    def parts(self) -> dict[str, float]:
        """The time of each part, by name."""
        return {
            "compute": self.compute,
            "memory": self.memory,
            "host": self.host,
            "bubble": self.bubble,
            "optimizer": self.optimizer,
            "offload": self.offload,
            **{f"traffic of {view}": seconds for view, seconds in self.exposed.items()},
        }

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """The part of the step that takes longest."""
        return max(self.parts.items(), key=lambda part: part[1])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of an optimizer step: payload bytes and numbers, by view and kind."""

    payloads: Mapping[tuple[View, Collective], float]
    calls: Mapping[tuple[View, Collective], float]


def traffic_of(
    model: ModelFigures, choice: PlanChoice, figures: StepFigures, *, is_counted: bool = False
) -> Traffic:
    """Return the collectives of a rank's step: what a program counts, and what engines add to it.

    The figures are of the choice's own program (`is_counted`), or follow from others: then what FSDP sends follows
    from the weights.
    """
    counted = {
        key: value for key, value in figures.payloads.items() if is_counted or key[0] not in _OF_SHARDS
    }
    # Gradients are reduced with the last micro-batch; all else is sent in each.
    times = {key: 1 if key in _OF_GRADIENTS else choice.accumulation for key in counted}
    payloads = {key: value * times[key] for key, value in counted.items()}
    calls = {key: figures.calls[key] * times[key] for key in counted}

    def add(view: View, kind: Collective, payload: float, number: float) -> None:
        if payload:
            payloads[view, kind] = payloads.get((view, kind), 0) + payload
            calls[view, kind] = calls.get((view, kind), 0) + number

    dividing = choice.num_dividing
    whole, gradients = figures.weights * dividing, figures.gradients * dividing
    blocks = max(1, model.num_blocks // choice.pipeline)
    if choice.by_blocks and not is_counted:
        if choice.strategy != "none":
            # In backward blocks are gathered again, and what is outside of them is not.
            inside = 1 - min(1.0, model.outside_weights / max(1.0, model.plain.first.weights))
            gathers = 1 if choice.strategy == "shard_grad_op" else 1 + inside
            add("fsdp", "all_gather", gathers * whole * model.gathered_share * choice.accumulation,
                gathers * blocks * choice.accumulation)  # fmt: skip
            add("fsdp", "reduce_scatter", gradients, blocks)
        if choice.data > 1:
            add("data", "all_reduce", gradients / dividing, blocks)
    elif choice.in_buckets:
        add("counts", "all_reduce", figures.gradients, max(1.0, figures.gradients / 25e6))
    elif choice.by_stages:
        add("fsdp", "reduce_scatter", gradients, blocks)
        gathers = 2 * choice.accumulation if choice.strategy == "zero3" else 1
        add("fsdp", "all_gather", gathers * whole, blocks)
    if choice.pipeline > 1:
        hidden = figures.activations / max(1, blocks) / 16  # of a block's activations, about its input
        add("pipeline", "send", 2 * hidden * choice.accumulation, 2 * choice.accumulation)
    if choice.expert > 1:
        # Four exchanges a block of the tokens that a rank sends: there and back, forward and backward.
        hidden = figures.activations / max(1, blocks) / 16
        add("expert", "all_to_all", 4 * hidden * 2 * blocks * choice.accumulation, 4 * blocks)
    return Traffic(payloads=payloads, calls=calls)


def spread(choice: PlanChoice, view: View, devices_per_host: int) -> tuple[int, bool]:
    """Return the number of ranks of a view, and whether they are all on one host.

    Example:
        >>> spread(PlanChoice(data=2, tensor=8), "tensor", 8), spread(PlanChoice(data=2, tensor=8), "data", 8)
        ((8, True), (2, False))
    """
    if view == "expert":
        return choice.expert, choice.expert <= devices_per_host
    axes = VIEWS.get(view, (view,))
    number = extent = stride = 1
    for axis in reversed(AXES):
        size: int = getattr(choice, axis)
        if size > 1 and axis in axes:
            number *= size
            extent = stride * size
        stride *= size
    return number, extent <= devices_per_host


def seconds_of(
    kind: Collective, payload: float, calls: float, number: int, rate: float, latency: float
) -> float:
    """Return the time of collectives among `number` ranks, whose links carry `rate` bytes per second."""
    if number < 2:
        return 0.0
    return _PASSES[kind] * (number - 1) / number * payload / rate + calls * latency * ceil(log2(number))


def _seconds_by_view(choice: PlanChoice, traffic: Traffic, hardware: RunHardware) -> dict[View, float]:
    """Return the time of a step's collectives, whether or not they run beside computation."""
    by_view: dict[View, float] = {}
    views = {view: spread(choice, view, hardware.devices_per_host) for view, _ in traffic.payloads}
    for (view, kind), payload in traffic.payloads.items():
        number, is_near = views[view]
        rate = hardware.peer_rate if is_near else min(hardware.peer_rate, hardware.network_rate)
        rate *= hardware.link_efficiency * hardware.shares.get(kind, 1)
        calls = traffic.calls[view, kind]
        taken = seconds_of(kind, payload, calls, number, rate, hardware.latency_seconds)
        by_view[view] = by_view.get(view, 0) + taken
    return by_view


def step_time(
    model: ModelFigures,
    choice: PlanChoice,
    figures: StepFigures,
    traffic: Traffic,
    hardware: RunHardware,
    *,
    in_half: bool,
    is_simulated: bool = False,
) -> StepTime:
    """Return the time of an optimizer step: a roofline of the operations, and collectives by size and latency.

    `figures` are those of a rank's micro-batch. With `in_half`, matrix products are computed in half precision. The
    waits of a pipeline are those of its simulated schedule, or of equal stages by arithmetic, which takes no time and
    leaves out what sending adds.
    """
    times = choice.accumulation
    flops = hardware.flops if in_half else hardware.fp32_flops
    compute = times * figures.flops / (flops * hardware.efficiency)
    memory = times * figures.moved / (hardware.memory_rate * hardware.efficiency)
    # A device computes while its host issues the next operations; the CPU does one thing at a time.
    issuing = times * figures.operations * hardware.operation_seconds
    host = max(0.0, issuing - compute - memory) if hardware.overlaps else issuing
    exposed: dict[View, float] = {}
    work = compute + memory + host
    for view, taken in _seconds_by_view(choice, traffic, hardware).items():
        beside = _BESIDE.get(view) if hardware.overlaps else None
        if beside is None:
            exposed[view] = taken
        else:
            hidden = work if beside == "blocks" else _BACKWARD * work / times
            exposed[view] = max(0.0, taken - hidden) + taken / max(1, model.num_blocks)
    bubble = 0.0
    if choice.pipeline > 1 and is_simulated:
        sending = exposed.pop("pipeline", 0.0)
        bubble = _simulated_bubble(choice, (work + sum(exposed.values())) / times, sending / (2 * times))
    elif choice.pipeline > 1:
        bubble = (choice.pipeline - 1) / times * (work + sum(exposed.values()))
    optimizer = figures.stepped / (hardware.memory_rate * hardware.efficiency)
    offload = 0.0
    if choice.offload != "none":
        held = figures.weights + figures.gradients + figures.states
        optimizer = held / (_HOST_MEMORY if choice.offload == "host" else _NVME)
        offload = max(0.0, times * (2 * figures.weights + figures.gradients) / hardware.host_rate - work)
    return StepTime(
        compute=compute,
        memory=memory,
        host=host,
        exposed=exposed,
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
    )


def _simulated_bubble(choice: PlanChoice, seconds: float, transfer: float) -> float:
    """Return how long a stage waits in a step, by the order of a pipeline's default schedule.

    A micro-batch takes `seconds` in a stage, forward and backward, and `transfer` seconds to the next stage.
    """
    order = plan_order(SCHEDULES["1f1b"], choice.pipeline, choice.accumulation)
    parts: dict[Kind, float] = {"forward": (1 - _BACKWARD) * seconds, "backward": _BACKWARD * seconds}
    times = simulate(order, choice.pipeline, parts, transfer=transfer)
    return max(one.end for each in times for one in each) - choice.accumulation * seconds
