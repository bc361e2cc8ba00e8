from dataclasses import replace

import pytest

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.errors import PlanError
from drivetrain_plan.hardware import parse_hardware
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.candidates import TrainingJob, divisors
from drivetrain_plan.search.model_figures import BatchFigures, ModelFigures
from drivetrain_plan.search.ranking import search

GB = 1e9


def model_of(weights: float, activations: float = GB, *, tensor: tuple[int, ...] = (1,)) -> ModelFigures:
    """A model of 32 blocks, trained by Adam in fp32."""
    sample = StepFigures(
        activations=activations,
        forward=activations,
        early=activations,
        computing=activations,
        flops=1e13,
        moved=1e9,
    )
    lasting = StepFigures(
        weights=weights,
        gradients=weights,
        states=2 * weights,
        late=weights,
        stepping=weights,
        stepped=4 * weights,
    )
    gathered = weights / 16
    sharded = StepFigures(
        weights=weights / 2,
        gradients=weights / 2,
        states=weights,
        late=weights / 2 + gathered,
        stepping=weights / 2,
        stepped=2 * weights,
    )
    held = StepFigures(forward=gathered, early=gathered, computing=gathered)
    less = StepFigures(activations=activations / 10, forward=activations / 10, early=activations / 8,
                       computing=activations / 8, flops=1.3e13, moved=1e9)  # fmt: skip
    half = replace(sample, weights=weights / 2, gradients=weights / 2, states=weights, flops=5e12,
                   activations=activations / 2, forward=activations / 2, computing=activations / 2,
                   payloads={("tensor", "all_reduce"): 1e8}, calls={("tensor", "all_reduce"): 128.0})  # fmt: skip
    return ModelFigures(
        name="model",
        num_parameters=int(weights / 4),
        num_tokens=1024,
        num_blocks=32,
        block_weights=weights / 33,
        outside_weights=weights / 33,
        plain=BatchFigures(first=lasting.plus(sample), further=sample),
        sharded={
            "none": BatchFigures(first=sharded.plus(sample).plus(held), further=sample),
            "full": BatchFigures(first=sharded.plus(less).plus(held), further=less),
        },
        halves={"tensor": half, "tensor and sequence": half},
        tensor_sizes=tensor,
    )


def best(model: ModelFigures, hardware: str, batch: int = 64, **pins: object) -> PlanChoice:
    plans, _ = search(model, parse_hardware(hardware), TrainingJob(batch=batch, pins=pins), in_half=True)
    return plans[0].choice


def test_what_fits_every_device_is_replicated() -> None:
    assert best(model_of(2 * GB), "8x80GB h100").name == "DDP 8"
    assert best(model_of(2 * GB), "1x80GB h100").name == "one device"


def test_what_does_not_fit_is_sharded_and_recomputed_only_if_need_be() -> None:
    found = best(model_of(25 * GB), "8x80GB h100")
    assert (found.backend, found.checkpointing, found.offload) == ("fsdp", "none", "none")
    found = best(model_of(25 * GB, activations=60 * GB), "8x80GB h100", batch=8)
    assert (found.backend, found.checkpointing, found.offload) == ("fsdp", "full", "none")


def test_offload_comes_last() -> None:
    hardware = parse_hardware("2x40GB a100")
    plans, _ = search(model_of(25 * GB), hardware, TrainingJob(batch=2), in_half=True)
    assert plans
    assert all(plan.choice.offload == "host" for plan in plans)


@pytest.mark.parametrize("batch", [8, 48, 1024])
def test_every_plan_keeps_the_batch_and_the_devices(batch: int) -> None:
    hardware = parse_hardware("8x80GB h100 x 2 hosts")
    plans, rejected = search(
        model_of(8 * GB, tensor=(1, 2, 4)), hardware, TrainingJob(batch=batch), in_half=True
    )
    assert plans
    for plan in (*plans, *rejected):
        choice = plan.choice
        assert choice.num_devices == 16
        assert choice.num_readers * choice.micro_batch * choice.accumulation == batch
        assert plan.memory.peak == pytest.approx(
            plan.memory.weights + plan.memory.gradients + plan.memory.states + plan.memory.activations
            + plan.memory.temporary
        )  # fmt: skip
        assert min(plan.memory.temporary, plan.memory.gradients, plan.time.seconds) >= 0


def test_pins_hold_and_the_rest_is_chosen() -> None:
    found = best(model_of(8 * GB, tensor=(1, 2, 4)), "8x80GB h100", tensor=4, pipeline=1)
    assert (found.tensor, found.num_devices) == (4, 8)
    assert best(model_of(2 * GB), "8x80GB h100", strategy="full_shard", shard=8).name == "FSDP 8"
    assert best(model_of(2 * GB), "8x80GB h100", backend="fsdp").backend == "fsdp"
    found = best(model_of(2 * GB), "1x80GB h100", batch=360, micro_batch=5)  # 360 has 24 divisors
    assert (found.micro_batch, found.accumulation) == (5, 72)


@pytest.mark.parametrize(
    ("pins", "batch", "told"),
    [
        ({"tensor": 3}, 64, "may be 1, 2, 4, 8"),
        ({"tensor": 8}, 64, "layers among 1"),
        ({"data": 8, "shard": 8}, 64, "do not divide 8 devices"),
        ({"shard": 8, "strategy": "full_shard"}, 7, "1 divide this batch"),
        ({"wheels": 4}, 64, "no part of a plan"),
        ({"strategy": "foo"}, 64, "strategy=foo: may be none, full_shard"),
        ({"checkpointing": "foo"}, 64, "checkpointing=foo: may be none, selective, full"),
        ({"strategy": "zero2"}, 64, "strategy=zero2 is DeepSpeed's: say --deepspeed"),
        ({"micro_batch": 3}, 64, "micro_batch=3 on 1 ranks.*does not divide a batch of 64"),
        ({"tensor": 0}, 64, "tensor=0: a size is a whole number"),
        ({"backend": "foo"}, 64, "backend=foo: may be single, ddp, fsdp, deepspeed, megatron"),
        (
            {"backend": "megatron", "shard": 2},
            64,
            "shard=2 with backend=megatron: .* data, tensor and pipeline",
        ),
        (
            {"backend": "megatron", "offload": "host"},
            64,
            "offload=host with backend=megatron: .* stay on the dev",
        ),
        ({"backend": "megatron", "checkpointing": "selective"}, 64, "selective.*may be none, full"),
    ],
)
def test_what_contradicts_itself_says_what_would_do(pins: dict[str, object], batch: int, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        best(model_of(2 * GB), "8x80GB h100", batch, **pins)


def test_models_of_megatron_are_replicated_divided_and_put_into_stages_alone() -> None:
    model = model_of(2 * GB, tensor=(1, 2, 4))
    plain = model.plain
    less = BatchFigures(first=plain.first.changed(activations=0), further=plain.further)
    model = replace(model, sharded={}, unsharded={"none": plain, "full": less})
    job = TrainingJob(batch=64, pins={"backend": "megatron"})
    plans, rejected = search(model, parse_hardware("8x80GB h100"), job, in_half=True)
    found = [plan.choice for plan in (*plans, *rejected)]
    assert {choice.backend for choice in found} == {"megatron"}
    assert all(choice.shard == choice.context == choice.expert == 1 for choice in found)
    assert {(choice.tensor, choice.pipeline) for choice in found} >= {(1, 1), (4, 1), (2, 2), (1, 8)}
    assert {choice.checkpointing for choice in found} == {"none", "full"}
    divided = best(model, "8x80GB h100", backend="megatron", tensor=4, sequence=True, checkpointing="full")
    assert divided.sections() == {
        "run": {"backend": "megatron", "mixed_precision": "no"},
        "parallel": {"data": 2, "tensor": 4},
    }
    assert divided.model_options() == {
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def test_stages_of_megatron_share_no_weights() -> None:
    plain = model_of(2 * GB).plain
    model = replace(model_of(2 * GB), unsharded={"none": plain}, ties_weights=True)
    assert best(model, "8x80GB h100", backend="megatron").pipeline == 1
    with pytest.raises(PlanError, match=r"pipeline=2 with backend=megatron: model ties weights"):
        best(model, "8x80GB h100", backend="megatron", pipeline=2)


def test_sequences_alone_may_shard() -> None:
    model = replace(model_of(2 * GB), halves={"context": model_of(GB).plain.first}, num_tokens=8192)
    found = best(model, "8x80GB h100", context=8, shard=1, backend="fsdp")
    assert (found.name, found.num_dividing) == ("FSDP x context 8", 8)


def test_parts_of_sequences_pass_between_no_stages() -> None:
    model = model_of(20 * GB, tensor=(1, 2))
    model = replace(model, halves={**model.halves, "context": model_of(GB).plain.first}, num_tokens=8192)
    plans, rejected = search(model, parse_hardware("8x80GB h100"), TrainingJob(batch=64), in_half=True)
    found = [plan.choice for plan in (*plans, *rejected)]
    assert any(one.context > 1 for one in found)
    assert any(one.sequence for one in found)
    assert not [one.name for one in found if one.pipeline > 1 and (one.context > 1 or one.sequence)]


def test_tensor_stays_within_a_host() -> None:
    model = model_of(200 * GB, tensor=(1, 2, 4, 8))
    plans, rejected = search(
        model, parse_hardware("4x80GB h100 x 4 hosts"), TrainingJob(batch=64), in_half=True
    )
    assert max(plan.choice.tensor for plan in (*plans, *rejected)) == 4


def test_divisors_rise() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
