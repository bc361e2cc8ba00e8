"""The choices that are possible: divisors of the devices, the blocks, the heads and the batch. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, get_args

from drivetrain_plan.choice import FIXED_BY, Checkpointing, Offload, PlanChoice, Strategy
from drivetrain_plan.errors import PlanError
from drivetrain_plan.hardware import RunHardware
from drivetrain_plan.search.model_figures import ModelFigures

_AXES = ("pipeline", "data", "shard", "context", "tensor")
_PINS = frozenset(
    {*_AXES, "expert", "strategy", "offload", "checkpointing", "sequence", "micro_batch", "backend"}
)
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "strategy": get_args(Strategy),
    "offload": get_args(Offload),
    "checkpointing": get_args(Checkpointing),
    "sequence": (True, False),
    "backend": tuple(FIXED_BY),
}
_OF_ENGINES = ("zero1", "zero2", "zero3", "nvme")
LEAST_TOKENS = 1024  # of a rank, where sequences are divided
_FSDP = [("full_shard", "none"), ("full_shard", "host")]
_MOST_MICRO_BATCHES, _MOST_SHARDS = 8, 5  # sizes of micro-batches and of shards that are tried for a mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The batch of an optimizer step, and what of the choice is given.

    Attributes:
        batch: The number of samples of an optimizer step, over all ranks.
        engines: Whether plans of DeepSpeed are candidates.
        pins: Values of fields of `PlanChoice`, or of its `backend`, that a choice must have.
    """

    batch: int
    engines: bool = False
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanError(f"batch={self.batch}: a step has 1 sample or more")
        if unknown := sorted(set(self.pins) - _PINS):
            raise PlanError(f"{unknown[0]}: no part of a plan; may be given: {', '.join(sorted(_PINS))}")
        for name, value in self.pins.items():
            allowed = _WORDS.get(name)
            if allowed is not None and value not in allowed:
                raise PlanError(f"{name}={value}: may be {', '.join(map(str, allowed))}")
            if allowed is None and (type(value) is not int or value < 1):
                raise PlanError(f"{name}={value}: a size is a whole number of 1 or more")
        self._check_fixed()
        by_engine = [f"{name}={value}" for name, value in self.pins.items() if value in _OF_ENGINES]
        if by_engine and not self.engines:
            raise PlanError(
                f"{by_engine[0]} is DeepSpeed's: say --deepspeed, or engines=True, to plan with it"
            )

    @property
    def is_built(self) -> bool:
        """True if the loop is to build the model of Megatron's layers."""
        return "is_built" in self.fixed

    @property
    def fixed(self) -> Mapping[str, Any]:
        """The parts of a choice that are given: those pinned, and those that follow from its backend."""
        pins = {name: value for name, value in self.pins.items() if name != "backend"}
        return {**pins, **FIXED_BY.get(self.pins.get("backend", ""), {})}

    def _check_fixed(self) -> None:
        backend = self.pins.get("backend", "")
        for name, value in FIXED_BY.get(backend, {}).items():
            if self.pins.get(name, value) != value:
                raise PlanError(
                    f"{name}={self.pins[name]} with backend={backend}: its models are divided among data, tensor and "
                    "pipeline, and stay on the devices; leave it out, or plan with another backend"
                )
        if self.is_built and self.pins.get("checkpointing") == "selective":
            raise PlanError(
                f"checkpointing=selective with backend={backend}: its own selective recomputation is of attention "
                "alone, and is not planned; may be none, full"
            )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in rising order."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def candidates(
    model: ModelFigures, hardware: RunHardware, job: TrainingJob
) -> Iterator[tuple[PlanChoice, Sequence[int]]]:
    """Yield the choices of all devices that keep the batch and the pins, each with its micro-batches in rising order.

    Raises:
        PlanError: The pins contradict each other, the devices or the batch.
    """
    world, pins, backend = hardware.num_devices, job.fixed, job.pins.get("backend")
    check_pins(hardware, job)
    if job.is_built and model.ties_weights and pins.get("pipeline", 1) > 1:
        raise PlanError(
            f"pipeline={pins['pipeline']} with backend={backend}: {model.name} ties weights, which its stages do not "
            "share; leave it out, or untie them"
        )
    found = False
    for mesh in _meshes(model, hardware, job, pins):
        for way, sizes in _ways(model, job, mesh, pins):
            if backend is not None and way.by_blocks and way.strategy == "none":
                continue  # which is asked to shard
            if way.offload == "host" and hardware.kind == "cpu" and "offload" not in pins:
                continue  # whose memory is the host's
            if sizes and (backend is None or way.backend == backend):
                found = True
                yield way, sizes
    if not found:
        said = ", ".join(f"{name}={value}" for name, value in job.pins.items()) or "nothing pinned"
        readers = [n for n in divisors(world) if job.batch % n == 0]
        size, reading = pins.get("micro_batch", 1), pins.get("data", 1) * pins.get("shard", 1)
        if size > 1 and job.batch % (reading * size):
            raise PlanError(
                f"micro_batch={size} on {reading} ranks that read samples does not divide a batch of {job.batch}"
            )
        raise PlanError(
            f"no plan of {world} devices for a batch of {job.batch} with {said}: samples are divided among data x "
            f"shard ranks, of which {', '.join(map(str, readers))} divide this batch, and layers among "
            f"{', '.join(map(str, model.tensor_sizes))}; leave something free, or change the batch"
        )


def check_pins(hardware: RunHardware, job: TrainingJob) -> None:
    """Refuse pins that contradict each other or the devices, whatever the model.

    Raises:
        PlanError: They do; the message says what would do.
    """
    world, pins = hardware.num_devices, job.pins
    sizes = {axis: pins[axis] for axis in _AXES if axis in pins}
    for axis, size in sizes.items():
        if world % size:
            raise PlanError(
                f"{axis}={size} with {world} devices: a size divides them; may be "
                f"{', '.join(map(str, divisors(world)))}"
            )
    if world % prod(sizes.values()):
        said = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise PlanError(f"{said} do not divide {world} devices: leave one of them free")
    is_whole = pins.get("shard") == 1 and pins.get("context", 1) == 1
    if is_whole and (strategy := pins.get("strategy", "none")) != "none":
        raise PlanError(
            f"strategy={strategy} with shard=1: the strategy divides among several ranks; leave one of them free"
        )


def _meshes(
    model: ModelFigures, hardware: RunHardware, job: TrainingJob, pins: Mapping[str, Any]
) -> Iterator[PlanChoice]:
    """Yield the sizes of the axes."""

    def sizes(axis: str, free: list[int]) -> list[int]:
        return [pins[axis]] if axis in pins else free

    world = hardware.num_devices
    near = [n for n in model.tensor_sizes if hardware.devices_per_host % n == 0]
    for tensor in sizes("tensor", near):
        if tensor not in model.tensor_sizes or world % tensor:
            continue
        contexts = [n for n in divisors(world // tensor) if n == 1 or model.num_tokens // n >= LEAST_TOKENS]
        for context in sizes("context", contexts if "context" in model.halves else [1]):
            rest = world // (tensor * context)
            if world % (tensor * context) or (context > 1 and "context" not in model.halves):
                continue
            stages = [n for n in divisors(rest) if n == 1 or model.num_blocks % n == 0]
            if model.ties_weights and job.is_built:  # whose stages share no weight
                stages = [1]
            for pipeline in sizes("pipeline", stages):
                # Parts of sequences pass between no stages.
                if rest % pipeline or (pipeline > 1 and context > 1):
                    continue
                readers = rest // pipeline
                if job.batch % readers:
                    continue
                for shard in sizes("shard", _spread(divisors(readers), _MOST_SHARDS)):
                    if readers % shard or pins.get("data", readers // shard) != readers // shard:
                        continue
                    mesh = PlanChoice(
                        pipeline=pipeline, data=readers // shard, shard=shard, context=context, tensor=tensor,
                        is_built=job.is_built,
                    )  # fmt: skip
                    yield from _with_experts(model, mesh, pins)


def _with_experts(model: ModelFigures, mesh: PlanChoice, pins: Mapping[str, Any]) -> Iterator[PlanChoice]:
    among = mesh.shard * mesh.context * mesh.tensor
    free = [1]
    if model.num_experts and mesh.shard > 1:
        free += [n for n in divisors(among) if n > 1 and model.num_experts % n == 0 and n % mesh.tensor == 0]
    for expert in [pins["expert"]] if "expert" in pins else free:
        if expert == 1 or (model.num_experts and among % expert == 0 and model.num_experts % expert == 0):
            yield replace(mesh, expert=expert)


def _ways(
    model: ModelFigures, job: TrainingJob, mesh: PlanChoice, pins: Mapping[str, Any]
) -> Iterator[tuple[PlanChoice, Sequence[int]]]:
    """Yield what can be done on a mesh: strategies and checkpointing, each with its micro-batches."""
    per_reader, fixed = job.batch // mesh.num_readers, {k: v for k, v in pins.items() if k != "micro_batch"}
    micro_batches = _spread(divisors(per_reader), _MOST_MICRO_BATCHES)
    if (pinned := pins.get("micro_batch")) is not None:
        micro_batches = [pinned] if per_reader % pinned == 0 else []
    if mesh.pipeline > 1:  # which has as many micro-batches as stages, or more
        micro_batches = [size for size in micro_batches if per_reader // size >= mesh.pipeline]
    is_plain = mesh.pipeline == mesh.context == mesh.tensor == mesh.expert == mesh.data == 1
    strategies: list[tuple[str, str]] = [("none", "none")] if mesh.shard == 1 else []
    if mesh.num_devices == 1:  # which keeps a whole model, or has its host keep it
        strategies += [("full_shard", "host")] if job.pins.get("backend") is None else _FSDP
    if mesh.shard * mesh.context > 1:
        strategies += [("shard_grad_op", "none")] if mesh.data == 1 else []
        strategies += _FSDP
    if job.engines and is_plain:
        strategies += [(f"zero{stage}", "none") for stage in (1, 2, 3)]
        strategies += [("zero2", "host"), ("zero3", "host"), ("zero3", "nvme")]
    for strategy, offload in strategies:
        known = model.unsharded if mesh.is_built else model.sharded
        for checkpointing in ("none",) if strategy.startswith("zero") else known:
            for sequence in (True, False) if mesh.tensor > 1 else (False,):
                if sequence and (
                    mesh.pipeline * mesh.context * mesh.expert > 1
                    or "tensor and sequence" not in model.halves
                ):
                    continue
                if mesh.tensor > 1 and not sequence and "tensor" not in model.halves:
                    continue
                way = replace(
                    mesh,
                    strategy=strategy,
                    offload=offload,
                    checkpointing=checkpointing,
                    sequence=sequence,
                )
                if all(getattr(way, name) == value for name, value in fixed.items()):
                    yield way, micro_batches


def _spread(numbers: list[int], most: int) -> list[int]:
    """Return at most some of the numbers, the least and the largest among them."""
    if len(numbers) <= most:
        return numbers
    last = len(numbers) - 1
    return [numbers[last * place // (most - 1)] for place in range(most)]
