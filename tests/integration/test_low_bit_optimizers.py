"""Optimizers with states in 8 bits and fewer: through `prepare`, checkpoints and other numbers of ranks."""

import logging
from pathlib import Path

import pytest
import torch

from drivetrain_deepspeed import EngineConfigError
from integration.low_bit_training import (
    ALL,
    BITSANDBYTES,
    TORCHAO,
    forms,
    net,
    run,
    steps,
    training,
    values,
    weights,
)
from logged_messages import messages_of
from optional_modules import skip_without
from plain_loop.accelerated import accelerator_of
from plain_loop.case import assert_same_on_all_ranks

skip_without("torchao")
skip_without("bitsandbytes")
LOW_BIT = {**TORCHAO, **BITSANDBYTES}
CLASSES = {
    "torchao AdamW8bit": "OptimState8bit",
    "torchao AdamW4bit": "OptimState4bit",
    "torchao AdamWFp8": "OptimStateFp8",
}
EIGHT = "torchao AdamW8bit"
# bitsandbytes tells it for each process of CPU tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.slow
def test_training_goes_on_bit_for_bit_in_one_process(tmp_path: Path, name: str) -> None:
    dtype = torch.bfloat16 if "rounding" in name else torch.float32
    whole = run(tmp_path / "whole", name, 0, 4, dtype=dtype)
    run(tmp_path / "parts", name, 0, 3, dtype=dtype)
    assert run(tmp_path / "parts", name, 3, 4, dtype=dtype) == whole


def check_goes_on(folder: Path, backend: str, name: str) -> list[float]:
    whole = run(folder / "whole", name, 0, 4, backend=backend)
    run(folder / "parts", name, 0, 3, backend=backend)
    assert run(folder / "parts", name, 3, 4, backend=backend) == whole
    assert_same_on_all_ranks(whole)
    return whole


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOW_BIT)
def test_training_goes_on_bit_for_bit_under_ddp(tmp_path: Path, name: str) -> None:
    found = check_goes_on(tmp_path, "ddp", name)
    # Equal batches: as a plain loop on one of them.
    plain = net()
    optimizer = ALL[name](plain.parameters())
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            plain(
                torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            ).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.cat([value.flatten() for value in plain.state_dict().values()]).tolist()
    assert found == pytest.approx(expected, abs=1e-5) or "rounding" in name


def shards(folder: str) -> None:
    """FSDP2 trains as DDP does, and goes on bit for bit, alone and from each other's checkpoints."""
    for name in CLASSES:
        place = Path(folder, name)
        whole = run(place / "whole", name, 0, 4, backend="fsdp")
        assert run(place / "replicas", name, 0, 4, backend="ddp") == pytest.approx(whole, abs=1e-5)
        run(place / "parts", name, 0, 3, backend="fsdp")
        with training(place / "parts", name, backend="fsdp") as (accelerator, model, optimizer):
            assert accelerator.load_state() == 3
            assert forms(optimizer).count(CLASSES[name]) == 2
            steps(accelerator, model, optimizer, 3, 4)
            assert weights(accelerator, model) == whole
        with training(place / "parts", name, backend="ddp") as (accelerator, model, optimizer):
            assert accelerator.load_state() == 3
            assert forms(optimizer).count(CLASSES[name]) == 2
            steps(accelerator, model, optimizer, 3, 4)
            assert weights(accelerator, model) == pytest.approx(whole, abs=1e-5)


def resumed(folder: str, name: str, backend: str) -> tuple[list[float], list[str], list[str]]:
    """Go on from step 3; the weights, the forms of this rank's states, and what was logged."""
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(folder, name, backend=backend) as (accelerator, model, optimizer),
    ):
        assert accelerator.load_state(Path(folder, "checkpoints", "step-3")) == 3
        found = forms(optimizer)
        steps(accelerator, model, optimizer, 3, 5)
        return weights(accelerator, model), found, messages


@pytest.mark.slow
def test_fsdp_trains_as_ddp_does_and_resumes_on_another_number_of_ranks(run_ranks, tmp_path: Path) -> None:
    run_ranks(shards, str(tmp_path))
    for name, form in CLASSES.items():
        folder = str(tmp_path / name / "parts")
        (expected, _, _), _ = run_ranks(resumed, folder, name, "fsdp")  # 2 -> 2
        found, found_forms, messages = resumed(folder, name, "single")  # 2 -> 1
        assert found_forms.count(form) == 2
        assert found == pytest.approx(expected, abs=1e-5)
        assert not any("floating point now" in message for message in messages)


@pytest.mark.slow
def test_fsdp_resumes_on_four_ranks_with_the_same_codes(run_ranks, tmp_path: Path) -> None:
    run_ranks(shards, str(tmp_path))
    for name, form in CLASSES.items():
        folder = str(tmp_path / name / "parts")
        (expected, _, _), _ = run_ranks(resumed, folder, name, "fsdp")
        for found, found_forms, _ in run_ranks(resumed, folder, name, "fsdp", num_processes=4):  # 2 -> 4
            assert (
                found_forms.count(form) == 2
            )  # though a fresh optimizer would keep such small shards in fp32
            assert found == pytest.approx(expected, abs=1e-5)


def cut(folder: str) -> tuple[list[str], list[list[float]], list[str]]:
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(folder, EIGHT, rows=132, backend="fsdp") as (accelerator, model, optimizer),
    ):
        accelerator.load_state()
        found = values(optimizer)
        steps(accelerator, model, optimizer, 2, 3)
        accelerator.save_state()
        return forms(optimizer), [one.flatten().tolist() for one in found], messages


@pytest.mark.slow
def test_shards_that_cut_blocks_keep_the_values_in_floating_point_and_it_is_said(
    run_ranks, tmp_path: Path
) -> None:
    with training(tmp_path, EIGHT, rows=132) as (accelerator, model, optimizer):
        steps(accelerator, model, optimizer, 0, 2)
        accelerator.save_state()
        whole = values(optimizer)
        assert "OptimState8bit" in forms(optimizer)
    first, second = run_ranks(cut, str(tmp_path))
    for expected, one, other in zip(whole, first[1], second[1], strict=True):
        assert one + other == expected.flatten().tolist()
    assert first[0][0] == "Tensor"  # 66 rows of 64 are 16.5 blocks
    assert first[2][0].startswith("AdamW8bit: 4 states are kept in floating point now")
    assert not any("floating point now" in message for message in second[2])  # rank 0 says it
    assert run(tmp_path, EIGHT, 3, 4, rows=132)


def mixed(folder: str, rows: int) -> tuple[list[str], list[str]]:
    """Save and resume in FSDP; the forms of the states, and what was said of them."""
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(folder, EIGHT, rows=rows, backend="fsdp") as (accelerator, model, optimizer),
    ):
        steps(accelerator, model, optimizer, 0, 3)
        accelerator.save_state()
        accelerator.save_state()
        found, expected = forms(optimizer), values(optimizer)
    with training(folder, EIGHT, rows=rows, backend="fsdp") as (accelerator, model, optimizer):
        accelerator.load_state()
        assert all(map(torch.equal, values(optimizer), expected))
        steps(accelerator, model, optimizer, 3, 4)
    return found, [message for message in messages if "on some ranks" in message]


# Of 127 rows, one rank has 64, which are whole blocks, and the other 63, which are too few for 8 bits. Of 129 rows,
# the 64 are the second rank's, and begin within a block.
@pytest.mark.parametrize(
    ("rows", "expected"), [(127, ("OptimState8bit", "Tensor")), (129, ("Tensor", "OptimState8bit"))]
)
@pytest.mark.slow
def test_a_state_in_8_bits_on_some_ranks_only_is_saved_with_its_values(
    run_ranks, tmp_path: Path, rows: int, expected: tuple[str, str]
) -> None:
    (first, messages), (second, others) = run_ranks(mixed, str(tmp_path), rows)
    assert (first[0], second[0]) == expected
    assert [message.partition(" on some ranks")[0] for message in messages] == [
        "AdamW8bit: 2 states are in few bits"
    ]
    assert not others


def test_a_checkpoint_in_8_bits_loads_into_adamw_and_back(tmp_path: Path) -> None:
    run(tmp_path / "low", EIGHT, 0, 3)
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(tmp_path / "low", "torch AdamW") as (accelerator, model, optimizer),
    ):
        assert accelerator.load_state() == 3
        steps(accelerator, model, optimizer, 3, 4)
        assert set(forms(optimizer)) == {"Tensor"}
    assert messages == ["AdamW: 4 states of another library's optimizer were dequantised into floating point"]
    run(tmp_path / "plain", "torch AdamW", 0, 3)
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(tmp_path / "plain", EIGHT) as (accelerator, model, optimizer),
    ):
        assert accelerator.load_state() == 3
        steps(accelerator, model, optimizer, 3, 4)
    assert messages[0].startswith("AdamW8bit: 0 of 6 parameters (0 % of elements) in 8 bits or fewer")
    assert "2 loaded or overridden so" in messages[0]


@pytest.mark.parametrize("name", [EIGHT, "bitsandbytes AdamW8bit"])
def test_tiny_tensors_are_kept_in_fp32_and_it_is_said(name: str) -> None:
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(None, name, rows=32) as (accelerator, model, optimizer),
    ):
        steps(accelerator, model, optimizer, 0, 1)
        states = accelerator.plan.facts["states 0"]
    assert messages[0] == states
    assert states.startswith("AdamW8bit: 0 of 6 parameters (0 % of elements) in 8 bits or fewer")
    assert states.endswith("in floating point: 6 of fewer than 4096 elements")
    with (
        messages_of("drivetrain_backends", level=logging.INFO) as messages,
        training(None, name) as (accelerator, model, optimizer),
    ):
        assert "states 0" not in accelerator.plan.facts  # there are none yet
        steps(accelerator, model, optimizer, 0, 2)
    assert len(messages) == 1
    assert "2 of 6 parameters (97.69 % of elements)" in messages[0]


@pytest.mark.parametrize("name", [EIGHT, "bitsandbytes AdamW8bit"])
def test_a_skipped_step_leaves_the_states_as_they_are(name: str) -> None:
    options = {"sections": {"run": {"show_plan": False, "on_nonfinite": "skip"}}}
    with training(None, name, **options) as (accelerator, model, optimizer):
        steps(accelerator, model, optimizer, 0, 2)
        before = weights(accelerator, model), str(optimizer.state_dict())
        accelerator.backward(model(torch.full((8, 64), torch.inf)).square().mean())
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped
        assert (weights(accelerator, model), str(optimizer.state_dict())) == before


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CLASSES)
def test_windows_of_micro_batches_with_clipping_train_as_whole_batches(
    tmp_path: Path, name: str, backend: str
) -> None:
    expected = run(tmp_path / "whole", name, 0, 3, backend="ddp")
    found = run(tmp_path / "parts", name, 0, 3, backend=backend, gradient_accumulation_steps=2)
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    # Sums in another order round a few codes otherwise.
    assert max(apart) < 1e-3
    assert sum(apart) / len(apart) < 1e-6


@pytest.mark.ranks(2)
def test_states_from_before_prepare_are_divided_with_their_codes() -> None:
    with torch.compiler.set_stance("force_eager"):
        model = net()
        optimizer = ALL[EIGHT](model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = [one.clone() for one in values(optimizer)]
        with accelerator_of("fsdp") as accelerator:
            accelerator.prepare(model, optimizer)
            for expected, found in zip(whole, values(optimizer), strict=True):
                assert torch.equal(found, expected.chunk(2)[accelerator.process_index])
            assert forms(optimizer).count("OptimState8bit") == 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_stochastic_rounding_goes_on_bit_for_bit_under_fsdp(tmp_path: Path) -> None:
    check_goes_on(tmp_path, "fsdp", "torchao stochastic rounding")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_fsdp_refuses_bitsandbytes_by_name_and_says_what_to_use(name: str) -> None:
    with (
        pytest.raises(ValueError, match=f"^{name.split()[1]} cannot step shards: ") as caught,
        training(None, name, backend="fsdp"),
    ):
        pass
    assert "backend='ddp' or 'single'" in str(caught.value)
    assert "torchao.optim.AdamW8bit" in str(caught.value)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("name", [*CLASSES, "bitsandbytes AdamW8bit", "bitsandbytes PagedAdamW8bit"])
def test_deepspeed_trains_them_at_stage_0_and_refuses_them_by_name_where_it_divides(
    tmp_path: Path, name: str
) -> None:
    check_goes_on_as_under_ddp(tmp_path, name, "deepspeed-0")
    said = f"^{name.split()[1]} with deepspeed.stage=2.*its step is not elementwise"
    with (
        pytest.raises(EngineConfigError, match=said) as caught,
        training(None, name, backend="deepspeed-2"),
    ):
        pass
    assert "deepspeed.stage=0 or backend='ddp'" in str(caught.value)
    if name == EIGHT:  # states in 8 bits go into ZeRO's own parts in fp32
        with training(tmp_path / "parts", "torch AdamW", backend="deepspeed-2") as (
            accelerator,
            model,
            optimizer,
        ):
            assert accelerator.load_state() == 3
            steps(accelerator, model, optimizer, 3, 4)


def check_goes_on_as_under_ddp(folder: Path, name: str, backend: str) -> None:
    expected = run(folder / "ddp", name, 0, 3, backend="ddp")
    run(folder / "parts", name, 0, 2, backend=backend)
    assert run(folder / "parts", name, 2, 3, backend=backend) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
def test_deepspeed_divides_states_without_blocks(tmp_path: Path) -> None:
    check_goes_on_as_under_ddp(tmp_path, "bitsandbytes AdamW32bit", "deepspeed-2")
