"""Plan the training of a model on given hardware: figures from its program, a search, and the best run once more."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain_backends.modules.wrap_policy import plan_blocks
from drivetrain_dispatch.errors import CostError
from drivetrain_parallel import ParallelPlanError, named_cuts, plan_experts, plan_model
from drivetrain_plan.choice import Checkpointing, PlanChoice
from drivetrain_plan.compat import fake_meshes
from drivetrain_plan.errors import PlanError
from drivetrain_plan.hardware import RunHardware
from drivetrain_plan.model.layers import num_blocks
from drivetrain_plan.model.source import BuiltSource, ModelSource
from drivetrain_plan.model.training_modes import Parameters, TrainingMode
from drivetrain_plan.program.figures import StepFigures, extrapolate
from drivetrain_plan.program.rank_step import run_rank
from drivetrain_plan.search.candidates import LEAST_TOKENS, TrainingJob, check_pins, divisors
from drivetrain_plan.search.formula import formula_figures
from drivetrain_plan.search.memory import figures_of_rank
from drivetrain_plan.search.model_figures import BatchFigures, ModelFigures
from drivetrain_plan.search.ranking import (
    MOST_REJECTED,
    SPARE,
    PlanTable,
    TrainingPlan,
    predict,
    ranked,
    reasons,
    search,
    why_rejected,
)

# Blocks of each make in the shortest program. FSDP holds one, the next that is gathered ahead, and what it reduces of
# the one before: the first that adds nothing else is the fourth.
_KEPT, _KEPT_SHARDED = 2, 3
_WHOLE = 4  # blocks of a make, up to which the program runs whole
_MOST_TENSOR = 16  # ranks that divide a layer
_KINDS: tuple[Checkpointing, ...] = ("none", "full")  # that are tried; each takes programs of its own
_EXACT = 4  # plans whose own program is run

_UNDIVIDED = (
    CostError,
    ParallelPlanError,
    PlanError,
)  # what a program raises that cannot be divided or run so

Run = Callable[..., StepFigures]


def plan_training(
    source: ModelSource,
    hardware: RunHardware,
    job: TrainingJob,
    mode: TrainingMode,
    *,
    num_tokens: int = 1024,
    optimizer: str | Callable[[Parameters], torch.optim.Optimizer] = "adamw",
    exact: int = _EXACT,
) -> PlanTable:
    """Plan the training of a model. Nothing is computed or sent: programs run on tensors without data.

    Args:
        source: The source of the model.
        hardware: The devices to plan for.
        job: The batch, and what of the plan is given.
        mode: The dtypes of weights and computing.
        num_tokens: The number of tokens of a sample, if samples have tokens.
        optimizer: The name of the optimizer, of `training_modes.OPTIMIZERS`, or a function that makes it.
        exact: The number of plans, from the best, whose own program is run; one that then does not fit is rejected.

    Returns:
        The plans that fit, the best first; none if the model fits nowhere, which `missing` explains.

    Raises:
        PlanError: What is given contradicts itself, or the model cannot be trained; the message says what would do.
    """
    check_pins(hardware, job)
    # Megatron's own attention keeps the scores of all pairs of tokens.
    built = BuiltSource(source, mode, fuses_attention=not job.is_built)
    in_half = (mode.autocast or _dtype_of(built.build())).itemsize < 4
    with fake_meshes() as meshes:
        program = partial(
            run_rank, built, mode=mode, num_tokens=num_tokens, optimizer=optimizer, meshes=meshes
        )
        run = _once(program)
        model = measure_model(
            built, mode, run, num_tokens=num_tokens, most_tensor=hardware.devices_per_host, pins=job.fixed
        )
        plans, rejected = search(model, hardware, job, in_half=in_half)
        if model.basis == "program":
            counts = num_blocks(built.build())
            plans, refused = _run_best(plans, model, hardware, counts, run, exact, in_half=in_half)
            rejected = refused + rejected
    if plans:
        plans[0] = replace(plans[0], why=reasons(plans, rejected))
    return PlanTable(
        model=source.name,
        num_parameters=model.num_parameters,
        num_tokens=num_tokens,
        hardware=hardware,
        job=job,
        plans=tuple(plans),
        rejected=tuple(replace(one, why=why_rejected(one, hardware)) for one in rejected[:MOST_REJECTED]),
        why_formula=model.why,
    )


def _once(run: Run) -> Run:
    """Return a function that runs each program once: what it does not depend on is left out of the choice."""
    known: dict[object, StepFigures] = {}

    def once(choice: PlanChoice, *, kept: Mapping[tuple[str, int], int] | None = None) -> StepFigures:
        choice = replace(choice, accumulation=1, data=choice.data if choice.by_blocks else 1)
        key = choice, None if kept is None else tuple(sorted(kept.items()))
        if key not in known:
            known[key] = run(choice, kept=kept)
        return known[key]

    return once


def measure_model(
    source: BuiltSource,
    mode: TrainingMode,
    run: Run,
    *,
    num_tokens: int,
    most_tensor: int,
    pins: Mapping[str, Any] | None = None,
) -> ModelFigures:
    """Return the figures of a model, from programs with a few of its blocks; what is pinned needs fewer of them.

    A model whose forward depends on the values of tensors has no such program: its figures follow from its sizes, and
    say so.
    """
    model = source.build()
    counts = num_blocks(model)
    known = _sizes_of(model, source.name, mode, num_tokens, sum(counts.values()))
    figures, pins = partial(run_extrapolated, run, counts), pins or {}
    is_undivided = pins.get("tensor") == pins.get("context") == 1
    size = pins.get("micro_batch") if is_undivided else None

    def of_batches(**choice: Any) -> BatchFigures:
        if size is not None:  # no others are asked for
            return BatchFigures(first=figures(PlanChoice(micro_batch=size, **choice)), further=StepFigures())
        one, two = (figures(PlanChoice(micro_batch=number, **choice)) for number in (1, 2))
        return BatchFigures(first=one, further=two.plus(one, times=-1))

    kinds: tuple[Checkpointing, ...] = (pins["checkpointing"],) if "checkpointing" in pins else _KINDS
    is_built = "is_built" in pins
    way: dict[str, Any] = {"is_built": True} if is_built else {"shard": 2, "strategy": "full_shard"}
    try:
        plain = of_batches()
        by_kind = {kind: of_batches(checkpointing=kind, **way) for kind in kinds}
    except CostError as error:
        return replace(
            known, **formula_figures(model, num_tokens, known.num_parameters, kinds), why=str(error)
        )
    known = replace(known, plain=plain, **{"unsharded" if is_built else "sharded": by_kind})
    if is_undivided:
        return known
    few = source.build(dict.fromkeys(counts, 1))
    ranks = pins.get("context", 2 if num_tokens >= 2 * LEAST_TOKENS else 1)
    halves, tensor_sizes = _divisions(few, figures, most_tensor, divides_sequences=ranks > 1)
    return replace(known, halves=halves, tensor_sizes=tensor_sizes)


def _sizes_of(
    model: nn.Module, name: str, mode: TrainingMode, num_tokens: int, num_repeated: int
) -> ModelFigures:
    """Return what a model's parameters alone tell; what its programs tell is left empty."""
    blocks = plan_blocks(model, asked="fsdp.wrap").blocks
    sizes = [_size_bytes(model.get_submodule(block)) for block in blocks]
    experts, num_experts = 0.0, 0
    try:
        cuts = {p: cut for _, p, cut in named_cuts(model, plan_experts(model, 1))}
        experts = float(sum(p.numel() * p.itemsize for p in cuts))
        num_experts = next((cut.num_units for cut in cuts.values()), 0)
    except ParallelPlanError:
        pass  # lists of experts are not divided
    return ModelFigures(
        name=name,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_tokens=num_tokens,
        num_blocks=num_repeated,
        block_weights=max(sizes, default=0),
        outside_weights=_size_bytes(model) - sum(sizes),
        gathered_share=1.0 if mode.autocast is None else mode.autocast.itemsize / _dtype_of(model).itemsize,
        plain=BatchFigures(first=StepFigures(), further=StepFigures()),
        sharded={},
        num_experts=num_experts,
        ties_weights=len(dict(model.named_parameters(remove_duplicate=False)))
        > len(list(model.parameters())),
        expert_weights=experts,
    )


def _divisions(
    few: nn.Module, figures: Callable[..., StepFigures], most_tensor: int, *, divides_sequences: bool
) -> tuple[Mapping[str, StepFigures], tuple[int, ...]]:
    """Return the figures of one of two ranks by what they divide, and the numbers of ranks that can divide layers.

    `few` has one block of each make. What this model does not divide is left out.
    """
    sizes = [n for n in divisors(most_tensor) if n <= _MOST_TENSOR and _divides(few, n)]
    wanted: dict[str, PlanChoice] = {}
    if len(sizes) > 1:
        wanted["tensor"] = PlanChoice(tensor=2)
        wanted["tensor and sequence"] = PlanChoice(tensor=2, sequence=True)
    if divides_sequences:
        wanted["context"] = PlanChoice(context=2)
    halves: dict[str, StepFigures] = {}
    for name, choice in wanted.items():
        try:
            halves[name] = figures(choice, shortest=1)
        except _UNDIVIDED:
            continue
    return halves, tuple(sizes) if "tensor" in halves else (1,)


def run_extrapolated(
    run: Run, counts: Mapping[tuple[str, int], int], choice: PlanChoice, *, shortest: int | None = None
) -> StepFigures:
    """Return the figures of a choice's program for all blocks: run with a few of each make, and extrapolated."""
    if all(count <= _WHOLE for count in counts.values()):
        return run(choice)
    if shortest is None:
        shortest = _KEPT_SHARDED if choice.by_blocks else _KEPT
    least = {key: min(count, shortest) for key, count in counts.items()}
    longer = [key for key, count in counts.items() if count > shortest]
    more = [run(choice, kept={**least, key: shortest + 1}) for key in longer]
    wanted = [counts[key] - shortest for key in longer]
    return extrapolate(run(choice, kept=least), more, wanted)


def _run_best(
    plans: list[TrainingPlan],
    model: ModelFigures,
    hardware: RunHardware,
    counts: Mapping[tuple[str, int], int],
    run: Run,
    number: int,
    *,
    in_half: bool,
) -> tuple[list[TrainingPlan], list[TrainingPlan]]:
    """Run the programs of the best plans; return the plans that fit, and those that now do not."""
    done: list[TrainingPlan] = []
    refused: list[TrainingPlan] = []
    rest = list(plans)
    while rest and len(done) < number:
        plan = rest.pop(0)
        choice = plan.choice
        if choice.pipeline > 1:  # no program here runs stages
            figures = figures_of_rank(model, choice)
            done.append(predict(model, choice, hardware, in_half=in_half, figures=figures, is_simulated=True))
            continue
        if choice.by_stages or choice.expert > 1 or choice.offload != "none":
            done.append(plan)  # an engine's own, or what no program here runs
            continue
        try:
            figures = run_extrapolated(run, counts, choice)
        except _UNDIVIDED:
            done.append(plan)
            continue
        exact = predict(model, choice, hardware, in_half=in_half, figures=figures, basis="program")
        fits = exact.memory.peak <= hardware.memory_bytes * (1 - SPARE)
        (done if fits else refused).append(exact)
    return ranked(done, hardware) + rest, refused


def _divides(model: nn.Module, size: int) -> bool:
    if size == 1:
        return True
    try:
        return bool(plan_model(model, size).layers)
    except ParallelPlanError:
        return False


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's floating point parameters."""
    held = Counter[torch.dtype]()
    for parameter in model.parameters():
        held[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    return max(held, key=lambda dtype: held[dtype], default=torch.float32)


def _size_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in module.parameters())
