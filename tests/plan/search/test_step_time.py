from dataclasses import replace

import pytest

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.hardware import parse_hardware
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.model_figures import BatchFigures, ModelFigures
from drivetrain_plan.search.step_time import StepTime, Traffic, seconds_of, spread, step_time, traffic_of

NONE = BatchFigures(first=StepFigures(), further=StepFigures())
MODEL = ModelFigures(
    name="none",
    num_parameters=0,
    num_tokens=1,
    num_blocks=1,
    block_weights=0,
    outside_weights=0,
    plain=NONE,
    sharded={},
)
CPU = replace(
    parse_hardware("4x8GB cpu"), efficiency=1, link_efficiency=1, operation_seconds=1e-3, latency_seconds=0
)


@pytest.mark.parametrize(
    ("view", "found"),
    [
        ("tensor", (2, True)),
        ("context", (2, True)),
        ("shard", (2, True)),
        ("fsdp", (4, True)),
        ("data", (4, False)),
        ("counts", (16, False)),
        ("pipeline", (1, True)),
    ],
)
def test_a_view_spans_hosts_where_its_ranks_do(view: str, found: tuple[int, bool]) -> None:
    choice = PlanChoice(data=4, shard=2, context=2, tensor=2, strategy="full_shard")
    assert spread(choice, view, 8) == found  # type: ignore[arg-type]


def test_a_sum_passes_twice_and_a_gather_once() -> None:
    gather = seconds_of("all_gather", 1e9, 0, 4, 1e9, 0)
    assert gather == pytest.approx(0.75)
    assert seconds_of("all_reduce", 1e9, 0, 4, 1e9, 0) == 2 * gather
    assert seconds_of("all_reduce", 1e9, 1, 1, 1e9, 1) == 0  # one rank sends nothing
    assert seconds_of("all_gather", 0, 3, 8, 1e9, 1e-5) == pytest.approx(9e-5)


def time_of(figures: StepFigures, traffic: Traffic, **hardware: object) -> StepTime:
    choice = PlanChoice(shard=4, strategy="full_shard")
    return step_time(MODEL, choice, figures, traffic, replace(CPU, **hardware), in_half=False)


def test_a_device_waits_for_its_host_only_where_that_takes_longer() -> None:
    quiet = Traffic(payloads={}, calls={})
    work = StepFigures(
        flops=CPU.fp32_flops, operations=500
    )  # a second of products, half a second to issue them
    assert time_of(work, quiet).seconds == pytest.approx(1.5)
    assert time_of(work, quiet, overlaps=True).seconds == pytest.approx(1)
    many = replace(work, operations=3000)
    assert time_of(many, quiet, overlaps=True).host == pytest.approx(2)
    assert time_of(many, quiet, overlaps=True).bound_by == "host"


def test_a_kind_of_collective_has_a_rate_of_its_own() -> None:
    sent = Traffic(
        payloads={("fsdp", "reduce_scatter"): CPU.peer_rate}, calls={("fsdp", "reduce_scatter"): 1}
    )
    assert time_of(StepFigures(), sent).seconds == pytest.approx(0.75)
    assert time_of(StepFigures(), sent, shares={"reduce_scatter": 0.25}).seconds == pytest.approx(3)
    assert time_of(StepFigures(), sent, shares={"all_gather": 0.25}).seconds == pytest.approx(0.75)


def test_what_shards_send_follows_from_their_strategy_and_not_from_the_program_of_another() -> None:
    of_two = StepFigures(weights=50, gradients=50, payloads={("fsdp", "all_gather"): 999.0},
                         calls={("fsdp", "all_gather"): 1.0})  # fmt: skip
    sent = {
        choice.name: dict(traffic_of(MODEL, choice, of_two).payloads)
        for choice in (
            PlanChoice(shard=2, strategy="full_shard"),
            PlanChoice(shard=2, strategy="shard_grad_op"),
            PlanChoice(data=2, shard=2, strategy="full_shard"),
            PlanChoice(data=2, checkpointing="full"),
        )
    }
    gathered, summed = (
        {("fsdp", "all_gather"): 200.0, ("fsdp", "reduce_scatter"): 100.0},
        ("data", "all_reduce"),
    )
    assert sent["FSDP 2"] == gathered
    assert sent["FSDP grad-op 2"] == {**gathered, ("fsdp", "all_gather"): 100.0}
    assert sent["DDP 2 x FSDP 2"] == {**gathered, summed: 50.0}
    assert sent["DDP 2, recomputed"] == {summed: 50.0}
    counted = traffic_of(MODEL, PlanChoice(shard=2, strategy="full_shard"), of_two, is_counted=True)
    assert counted.payloads == of_two.payloads


@pytest.mark.parametrize(("stages", "pieces"), [(2, 2), (4, 8), (8, 32)])
def test_a_simulated_pipeline_waits_as_equal_stages_do_and_longer_where_links_are_slow(
    stages: int, pieces: int
) -> None:
    choice = PlanChoice(pipeline=stages, accumulation=pieces)
    work = StepFigures(flops=CPU.fp32_flops)  # a second of each micro-batch

    def of(sent: float, *, is_simulated: bool) -> StepTime:
        traffic = Traffic(
            payloads={("pipeline", "send"): sent * CPU.peer_rate}, calls={("pipeline", "send"): 0}
        )
        return step_time(MODEL, choice, work, traffic, CPU, in_half=False, is_simulated=is_simulated)

    quiet = of(0, is_simulated=True)
    assert quiet.bubble == pytest.approx(stages - 1)
    assert quiet.seconds == pytest.approx(of(0, is_simulated=False).seconds)
    slow = of(2.0 * pieces, is_simulated=True)
    assert slow.bubble > quiet.bubble
    assert "pipeline" not in slow.exposed
