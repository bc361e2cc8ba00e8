"""A backend that is left to the planner is chosen when the first model is prepared."""

import itertools
import json
import logging
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import Accelerator
from drivetrain_config import ConfigError
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_plan import PlanError
from drivetrain_state import OtherRankFailedError, ParallelDims
from plain_loop.accelerated import accelerator_of, weights_of
from planned_models import Perceptron

WIDTH, BATCH = 128, 4
# Bytes of a step of the model below: DDP holds 2.7 MB a rank, shards of two 1.7 MB.
ROOM_FOR_SHARDS = 2_100_000


@contextmanager
def room_of(size_bytes: int | None = None, *, rates: Path | None = None) -> Iterator[None]:
    """Let this rank's planner find so many bytes beside the model's own weights; `rates` is the file of rates."""
    real = free_bytes

    def found(device: torch.device) -> int | None:
        return real(device) if size_bytes is None else size_bytes

    # Measured once for all ranks and tests.
    cache = Path(gettempdir()) / "drivetrain_tests" / "rates.json" if rates is None else rates
    with (
        patch("drivetrain_plan.detected._free", lambda device, _: found(device)),
        patch("drivetrain_plan.detected.default_cache", lambda: cache),
        patch("drivetrain_plan.detected._SECONDS", 0.03),  # for each rate
    ):
        yield


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = Perceptron(WIDTH)
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=BATCH)


def trained(accelerator: Accelerator, num_steps: int = 7) -> dict[str, Tensor]:
    model, optimizer, loader = accelerator.prepare(*parts())
    batches = iter(loader)
    for _ in range(num_steps):
        (batch,) = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(accelerator, model)


def applied(accelerator: Accelerator, setting: str) -> tuple[Any, str]:
    row = accelerator.plan.as_dict()["settings"][setting]
    return row["applied"], row["reason"]


@pytest.mark.ranks(2)
@pytest.mark.default_cases("room for shards")
@pytest.mark.parametrize(
    ("room", "backend", "also"),
    [(None, "ddp", {}), (ROOM_FOR_SHARDS, "fsdp", {"fsdp.strategy"})],
    ids=["room for all", "room for shards"],
)
def test_the_best_plan_that_fits_is_taken_and_trains_alike(
    room: int | None, backend: str, also: set[str]
) -> None:
    with accelerator_of() as accelerator:
        expected = trained(accelerator)
    with room_of(room), accelerator_of("auto") as accelerator:
        found = trained(accelerator)
        assert applied(accelerator, "run.backend")[0] == backend
        assert all(applied(accelerator, setting)[1].startswith("of the plan ") for setting in also)
        facts = accelerator.plan.facts
        assert "by the program of a rank" in facts["plan"]
        assert ("measured" in facts) == accelerator.is_main_process
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_a_model_that_fits_nowhere_is_refused_on_all_ranks() -> None:
    with room_of(1000), accelerator_of("auto") as accelerator:
        model, optimizer, loader = parts()
        error = PlanError if accelerator.is_main_process else OtherRankFailedError
        with pytest.raises(error, match=r"Perceptron fits nowhere: the smallest plan, .* or name a backend"):
            accelerator.prepare(model, optimizer, loader)
    with accelerator_of() as accelerator:
        accelerator.prepare(model, optimizer)  # which is as it was


@pytest.mark.ranks(2)
@pytest.mark.default_cases("said2-none")
@pytest.mark.parametrize(("said", "recomputes"), [({}, None), ({}, "full"), ({"prefetch": 1}, "none")])
def test_what_a_section_leaves_open_is_chosen_and_the_rest_is_kept(
    said: dict[str, Any], recomputes: str | None
) -> None:
    model = {} if recomputes is None else {"activation_checkpointing": recomputes}
    sections = {"fsdp": {"strategy": "auto", **said}, "model": model}
    with room_of(), accelerator_of("fsdp", sections=sections) as accelerator:
        trained(accelerator, 2)
        assert applied(accelerator, "fsdp.strategy")[0] == "shard_grad_op"
        for section in ("fsdp", "model"):
            for name, value in sections[section].items():
                assert value == "auto" or applied(accelerator, f"{section}.{name}")[0] == value


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_the_runs_own_mesh_is_kept() -> None:
    with room_of(), accelerator_of("auto", parallelism=ParallelDims(tensor=2)) as accelerator:
        trained(accelerator, 1)
        assert "tensor 2; " in accelerator.plan.facts["plan"]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_a_llama_is_planned_on_the_runs_own_mesh(axis: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, use_cache=False))  # type: ignore[arg-type]
    ids = torch.randint(64, (8, 64))  # fewer than the planner divides by itself
    data: Any = [{"input_ids": one, "labels": one} for one in ids]
    with room_of(), accelerator_of("auto", parallelism=ParallelDims(**{axis: 2})) as accelerator:
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
        assert f"{axis} 2; " in accelerator.plan.facts["plan"]
        batch = next(iter(loader))
        accelerator.backward(model(**batch).loss)
        optimizer.step()


@pytest.mark.ranks(2)
def test_a_setting_that_contradicts_the_choice_is_refused() -> None:
    said = {"fsdp": {"strategy": "no_shard"}}
    with room_of(ROOM_FOR_SHARDS), accelerator_of("auto", sections=said) as accelerator:
        with pytest.raises(
            ConfigError, match=r"fsdp\.strategy='no_shard', and backend='auto' has chosen FSDP"
        ):
            accelerator.prepare(*parts())


def test_a_choice_draws_and_reads_nothing_of_the_loop(tmp_path: Path) -> None:
    with room_of(rates=tmp_path / "rates.json"), accelerator_of("auto") as accelerator:  # which measures
        objects = parts()
        before = torch.get_rng_state()
        _, _, loader = accelerator.prepare(*objects)
        assert torch.equal(torch.get_rng_state(), before)
        assert sum(len(batch) for (batch,) in loader) == 64


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(8, WIDTH)


@pytest.mark.parametrize(
    "loader", [None, DataLoader(Stream(), batch_size=BATCH)], ids=["no loader", "a stream"]
)
def test_without_a_batch_the_formula_answers_and_says_so(loader: Any) -> None:
    with room_of(), accelerator_of("auto") as accelerator:
        model, optimizer, _ = parts()
        accelerator.prepare(*([model, optimizer] if loader is None else [model, optimizer, loader]))
        assert "by formula" in accelerator.plan.facts["plan"]


def test_a_prediction_that_is_off_is_told_once_with_what_it_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with room_of(), accelerator_of("auto", project_dir=tmp_path) as accelerator:
        model, optimizer, loader = accelerator.prepare(*parts())
        check = accelerator._parts.prepared.on_step[-1].__self__  # pyright: ignore[reportPrivateUsage]
        assert math.isfinite(check._plan.time.seconds)
        slow = check._plan.time
        with patch.object(type(slow), "seconds", 1e-9):
            for (batch,) in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    told = [one.getMessage() for one in caplog.records if "was off by more than 15 %" in one.getMessage()]
    assert len(told) == 1
    assert "Not modelled: what the loop computes outside of the model" in told[0]
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert "steps 2 to 6" in stored["facts"]["measured"]


@pytest.mark.slow
def test_a_loaded_run_measures_its_own_steps(tmp_path: Path) -> None:
    for loads in (False, True):
        with room_of(), accelerator_of("auto", project_dir=tmp_path) as accelerator:
            model, optimizer, loader = accelerator.prepare(*parts())
            if loads:
                assert accelerator.load_state() == 5
            for (batch,) in itertools.islice(itertools.cycle(loader), 6 if loads else 5):
                assert "measured" not in accelerator.plan.facts
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if not loads:
                accelerator.save_state()
        assert ("measured" in accelerator.plan.facts) == loads


@pytest.mark.slow
def test_models_are_built_on_the_host_until_the_choice() -> None:
    with accelerator_of("auto") as accelerator:
        with accelerator.building():
            assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_a_run_that_names_no_backend_plans_nothing(python: str) -> None:
    program = (
        "import sys, torch; from drivetrain import Accelerator\n"
        "a = Accelerator(cpu=True); m = torch.nn.Linear(1, 1)\n"
        "a.prepare(m, torch.optim.SGD(m.parameters()))\n"
        "print([name for name in sys.modules if name.startswith('drivetrain_plan.')])\n"
    )
    ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


class Pair(Perceptron):
    def forward(self, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return scale * super().forward(x)


class Wrapped(torch.optim.SGD):
    """An optimizer that another one makes."""

    def __init__(self, parameters: Any, around: torch.optim.Optimizer) -> None:
        super().__init__(parameters, lr=around.defaults["lr"])


@pytest.mark.parametrize("guess", ["call", "optimizer"])
def test_what_cannot_be_guessed_of_a_loop_is_told_and_trains(guess: str) -> None:
    model, optimizer, loader = parts()
    if guess == "call":
        model = Pair(WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = Wrapped(model.parameters(), optimizer)
    with room_of(), accelerator_of("auto") as accelerator:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for (batch,) in loader:
            output = model(batch, 2.0) if guess == "call" else model(batch)
            accelerator.backward(output.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert ("by formula" in accelerator.plan.facts["plan"]) == (guess == "call")
