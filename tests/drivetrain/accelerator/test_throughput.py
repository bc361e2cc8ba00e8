"""The throughput of a run: what is counted, where the time goes, what is logged, who is slow."""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Accelerator
from drivetrain_parallel import expert_counts
from drivetrain_state import ParallelDims
from drivetrain_throughput import Throughput
from logged_messages import messages_of
from plain_loop.accelerated import take_steps
from sequence_layer import RoutedLayer, SequenceLayer

NUM_FLOPS = 2 * 4 * 8 * 1  # of a forward of 4 samples; a backward to the weights alone takes as many


class Texts(Dataset[dict[str, Tensor]]):
    """Twenty samples of five tokens, each after `seconds` on the rank `slow`."""

    def __init__(self, *, seconds: float = 0.0, slow: int = 0, num: int = 20) -> None:
        self.seconds = seconds if int(os.environ.get("RANK", "0")) == slow else 0.0
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return {"x": torch.ones(8), "input_ids": torch.arange(5)}


class SlowGradient(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Linear):
    """A layer that sleeps in its forward, or before its backward, on one rank."""

    def __init__(self, seconds: float = 0.0, slow: int = 0, *, backward_seconds: float = 0.0) -> None:
        super().__init__(8, 1)
        is_slow = int(os.environ.get("RANK", "0")) == slow
        self.seconds = seconds if is_slow else 0.0
        self.backward_seconds = backward_seconds if is_slow else 0.0

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return SlowGradient.apply(super().forward(input), self.backward_seconds)


def make(tracking: dict[str, Any], **arguments: Any) -> Accelerator:
    sections = {"tracking": tracking, "run": {"show_plan": False}}
    return Accelerator(cpu=True, sections=sections, **arguments)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    data: Dataset[Any],
    *,
    after_step: Callable[[], None] = lambda: None,
) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).mean())
            optimizer.step()
            optimizer.zero_grad()
        after_step()
    return model


def counted(throughput: Throughput) -> tuple[float, float]:
    """Samples and tokens, of the steps that were measured."""
    assert throughput.samples_per_second is not None
    assert throughput.tokens_per_second is not None
    return (
        round(throughput.samples_per_second * throughput.seconds, 3),
        round(throughput.tokens_per_second * throughput.seconds, 3),
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if any(name.startswith("throughput/") for name in line)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_real_samples_and_tokens_are_counted_once(accumulation: int) -> None:
    with make({"throughput": True}, gradient_accumulation_steps=accumulation) as accelerator:
        train(accelerator, Slow(), Texts(num=18))
        total = accelerator.total_throughput
        assert total.num_steps == -(-5 // accumulation)
        assert counted(total) == (18, 90)
        assert accelerator.throughput == total


def test_evaluation_between_steps_adds_time_but_no_samples() -> None:
    with make({"throughput": True}) as accelerator:
        evaluation = accelerator.prepare(DataLoader(Texts(), batch_size=2))

        def evaluate() -> None:
            for _ in evaluation:
                pass

        train(accelerator, Slow(), Texts(), after_step=evaluate)
        assert counted(accelerator.total_throughput) == (20, 100)


def test_time_is_found_in_the_phase_that_took_it(tmp_path: Path) -> None:
    with make({"throughput": True}, project_dir=tmp_path) as accelerator:

        def save() -> None:
            accelerator.save_state(tmp_path / "saves")

        train(accelerator, Slow(seconds=0.03), Texts(seconds=0.005, num=12), after_step=save)
        seconds = accelerator.total_throughput.phase_seconds
        assert seconds["forward"] >= 0.03
        assert seconds["data"] >= 0.02
        assert seconds["checkpoint"] > 0
        assert seconds["backward"] > 0
        assert seconds["optimizer"] > 0
        assert seconds["communication"] == 0


def test_a_mark_of_the_program_opens_no_phase_even_with_the_text_of_one() -> None:
    with make({"throughput": True}) as accelerator:

        def work() -> None:
            accelerator.context.progress.mark("checkpoint")
            time.sleep(0.01)

        train(accelerator, Slow(), Texts(num=12), after_step=work)
        seconds = accelerator.total_throughput.phase_seconds
        assert seconds["checkpoint"] == 0
        assert seconds["other"] > 0.005  # a mean of three steps: no step ends after the last sleep


def test_operations_of_the_first_step_are_counted_by_torchs_own_counter() -> None:
    with make({"throughput": True, "peak_flops": 1e9}, gradient_accumulation_steps=2) as accelerator:
        train(accelerator, Slow(), Texts(num=16))
        total = accelerator.total_throughput
        assert total.mfu is not None
        assert total.steps_per_second is not None
        assert total.mfu * 1e9 / total.steps_per_second == pytest.approx(2 * 2 * NUM_FLOPS)


def test_given_operations_are_taken_and_an_unknown_peak_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make({"throughput": True, "flops_per_step": 1e6, "peak_flops": 1e9}) as accelerator:
        train(accelerator, Slow(), Texts())
        total = accelerator.total_throughput
        assert total.mfu == pytest.approx(1e-3 * (total.steps_per_second or 0))
    with caplog.at_level(logging.INFO), make({"throughput": True}) as accelerator:
        train(accelerator, Slow(), Texts())
        assert accelerator.throughput.mfu is None
    told = [record for record in caplog.records if "throughput/mfu is left out" in record.message]
    assert len(told) == 1
    assert "tracking.peak_flops" in told[0].message


def test_tokens_come_from_the_named_field_or_a_function() -> None:
    with make({"throughput": True, "token_field": "x"}) as accelerator:
        train(accelerator, Slow(), Texts())
        assert counted(accelerator.throughput) == (20, 160)
    with make({"throughput": True, "token_field": "labels"}) as accelerator:
        train(accelerator, Slow(), Texts())
        assert accelerator.throughput.tokens_per_second is None
    with make({"throughput": True}) as accelerator:
        accelerator.count_tokens(lambda batch: len(batch["x"]) * 3)
        train(accelerator, Slow(), Texts())
        assert counted(accelerator.throughput) == (20, 60)


def test_a_token_field_that_no_batch_has_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with make({"throughput": True, "token_field": "labels"}) as accelerator:
        train(accelerator, Slow(), Texts())
    with make({"throughput": True}) as accelerator:  # nobody named a field: a batch of images has no tokens
        accelerator.prepare(DataLoader(torch.ones(4, 8)))
        for _ in accelerator.prepare(DataLoader(torch.ones(4, 8))):
            pass
    (told,) = [record.getMessage() for record in caplog.records if "token_field" in record.getMessage()]
    assert told.startswith(
        "token_field='labels': the batch, a dict, has no tensor of that name among its fields x, input_ids; "
        "throughput/tokens_per_second is left out. Name a field"
    )
    assert "accelerator.count_tokens(function)" in told


@pytest.mark.slow
def test_the_throughput_is_logged_by_itself_with_its_step(tmp_path: Path) -> None:
    with make({"throughput_every_steps": 2}, project_dir=tmp_path, log_with="jsonl") as accelerator:
        accelerator.init_trackers("run")
        train(accelerator, Slow(), Texts())
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [2, 4]
    assert {"throughput/samples_per_second", "throughput/seconds/data"} <= lines[0].keys()


def test_without_trackers_the_throughput_is_still_there() -> None:
    with make({"throughput_every_steps": 2}) as accelerator:
        train(accelerator, Slow(), Texts())
        assert counted(accelerator.total_throughput) == (20, 100)


def test_the_live_line_follows_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with make({"live_line": True}) as accelerator:
        train(accelerator, Slow(), Texts())
    assert capsys.readouterr().err.startswith("step 1 | ")


def test_off_nothing_is_observed_and_the_error_says_how_to_turn_it_on() -> None:
    with make({}) as accelerator:
        assert accelerator.context.progress.observers == ()
        with pytest.raises(
            RuntimeError, match=r"is not measured: .*\"throughput\": True.*throughput_every_steps"
        ):
            _ = accelerator.throughput


def test_a_forward_that_raises_leaves_the_stopwatch_usable() -> None:
    class Failing(Slow):
        def forward(self, input: Tensor) -> Tensor:
            if not input.any():
                raise RuntimeError("zeros")
            return super().forward(input)

    with make({"throughput": True, "peak_flops": 1e9}) as accelerator:
        model = accelerator.prepare(Failing())
        with pytest.raises(RuntimeError, match="zeros"):
            model(torch.zeros(1, 8))
        train(accelerator, Slow(), Texts())
        assert accelerator.total_throughput.num_steps == 5
        assert accelerator.total_throughput.mfu is not None


@pytest.mark.undisturbed
@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["data", "forward", "backward"])
@pytest.mark.default_cases("forward")
def test_the_rank_that_the_others_wait_for_is_named(where: str, tmp_path: Path) -> None:
    """Rank 1 sleeps in its data, forward or backward."""
    seconds = {where: 0.06}
    model = Slow(seconds.get("forward", 0.0), 1, backward_seconds=seconds.get("backward", 0.0))
    data = Texts(seconds=0.015 if where == "data" else 0.0, slow=1, num=48)
    options: dict[str, Any] = {"project_dir": tmp_path, "log_with": "jsonl", "backend": "ddp"}
    with (
        messages_of("drivetrain_throughput.rank_throughput") as warnings,
        make({"throughput_every_steps": 3}, **options) as accelerator,
    ):
        accelerator.init_trackers("run")
        train(accelerator, model, data)
        measured, rank = accelerator.total_throughput, accelerator.process_index
    assert len(warnings) == (0 if rank else 1), warnings
    if rank:
        return
    assert f"rank 1 (host {socket.gethostname()}) is slow: {where} takes it" in warnings[0]
    assert counted(measured) == (48, 240)
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [3, 6]
    assert all(line["throughput/straggler/rank"] == 1 for line in lines)
    assert all(0.04 < line["throughput/straggler/slower_by_seconds"] < 2 for line in lines)


@pytest.mark.ranks(2)
def test_logged_tokens_are_the_sum_over_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"project_dir": tmp_path, "log_with": "jsonl", "backend": "ddp"}
    with make({"throughput_every_steps": 2}, **options) as accelerator:
        rank = accelerator.process_index
        accelerator.count_tokens(lambda _: 10.0 if rank == 0 else 30.0)
        accelerator.init_trackers("run")
        train(accelerator, Slow(), Texts(num=16))
    if rank == 0:
        (line,) = logged(tmp_path)
        ratio = line["throughput/tokens_per_second"] / line["throughput/steps_per_second"]
        assert ratio == pytest.approx(40)


@pytest.mark.ranks(2)
def test_the_load_of_experts_is_logged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"project_dir": tmp_path, "log_with": "jsonl", "backend": "fsdp"}
    parallelism = ParallelDims(shard=2, expert=2)
    with make({"throughput_every_steps": 3}, parallelism=parallelism, **options) as accelerator:
        accelerator.init_trackers("run")
        model = RoutedLayer(8, 1)
        train(accelerator, model, Texts(num=24))
        sent = accelerator.reduce(torch.stack([*expert_counts(model).values()]), "sum")
        names, is_main = list(expert_counts(model)), accelerator.is_main_process
    if is_main:
        lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        (line,) = [one for one in lines if any(key.startswith("experts/") for key in one)]
        assert line["step"] == 3
        expected = (sent.max(1).values / sent.double().mean(1)).tolist()
        assert [line[f"experts/{name}/load"] for name in names] == pytest.approx(expected)
        assert max(expected) > 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.default_cases("context")
def test_ranks_that_divide_a_model_count_its_samples_and_tokens_once(axis: str, tmp_path: Path) -> None:
    """Both ranks read all of the same batches."""
    options: dict[str, Any] = {"project_dir": tmp_path, "log_with": "jsonl"}
    parallelism = ParallelDims(**{axis: 2})
    with make({"throughput_every_steps": 3}, parallelism=parallelism, **options) as accelerator:
        accelerator.init_trackers("run")
        train(accelerator, SequenceLayer(8, 1), Texts(num=12))
        assert counted(accelerator.total_throughput) == (12, 60)
        is_main = accelerator.is_main_process
    if is_main:
        (line,) = logged(tmp_path)
        of_a_step = (
            line[f"throughput/{each}_per_second"] / line["throughput/steps_per_second"]
            for each in ("samples", "tokens")
        )
        assert tuple(of_a_step) == pytest.approx((4, 20))


@pytest.mark.ranks(2)
def test_collectives_count_as_communication() -> None:
    with make({"throughput": True}, backend="ddp") as accelerator:
        train(accelerator, Slow(), Texts(), after_step=lambda: accelerator.gather(torch.ones(2)))
        assert accelerator.total_throughput.phase_seconds["communication"] > 0


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_each_step_is_told_however_unevenly_ranks_go(tmp_path: Path) -> None:
    """Ranks that are slow in turn and gather values of their own between the 20 steps, each of which is logged."""
    with make({"throughput_every_steps": 1}, project_dir=tmp_path, log_with="jsonl") as accelerator:
        accelerator.init_trackers("uneven")
        model, rank = torch.nn.Linear(8, 1), accelerator.process_index
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(40, 8)))
        )
        for step, (x,) in enumerate(loader):
            time.sleep(0.02 * (step % 2 == rank))
            take_steps(accelerator, model, optimizer, lambda _, x=x: model(x).sum(), [0])
            found = accelerator.gather(torch.tensor([10 * step + rank]))
            assert found.tolist() == [10 * step, 10 * step + 1]
    if rank == 0:
        records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        steps = [one["step"] for one in records if "throughput/seconds/forward" in one]
        assert steps == list(range(1, 21))
