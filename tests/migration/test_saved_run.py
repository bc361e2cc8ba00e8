import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accelerate_layout import write_accelerate_state
from drivetrain import Accelerator
from drivetrain_checkpoint import Checkpointer, ForeignStateError, read_manifest
from registered import Kept

BATCHES = torch.arange(48.0).reshape(6, 4, 2) / 48


def built(seed: int = 0, width: int = 3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = AdamW(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 2)


def plain_steps(model, optimizer, scheduler, batches) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps(accelerator, model, optimizer, scheduler, batches) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(folder: Path, *, safe: bool = True, **more) -> list[float]:
    """Train as a plain loop for 3 steps, write what Accelerate would, and give the losses that follow."""
    model, optimizer, scheduler = built()
    plain_steps(model, optimizer, scheduler, BATCHES[:3])
    write_accelerate_state(
        folder,
        models=[model.state_dict()],
        optimizers=[optimizer.state_dict()],
        schedulers=[scheduler.state_dict()],
        safe=safe,
        **more,
    )
    torch.manual_seed(0)  # the generators of rank 0 in that folder
    return plain_steps(model, optimizer, scheduler, BATCHES[3:])


@pytest.mark.parametrize("safe", [True, False])
def test_the_next_losses_are_those_of_the_loop_that_went_on(tmp_path: Path, safe: bool) -> None:
    expected = trained(tmp_path, safe=safe, custom=[{"value": 5}])
    accelerator = Accelerator(cpu=True)
    objects = accelerator.prepare(*built(seed=1))
    kept = Kept()
    accelerator.register_for_checkpointing(kept)
    assert accelerator.load_state(tmp_path) == 3
    assert steps(accelerator, *objects, BATCHES[3:]) == expected
    assert kept.value == 5


def test_the_run_is_then_saved_and_resumed_as_any(tmp_path: Path) -> None:
    expected = trained(tmp_path / "checkpoints" / "checkpoint_3")
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    objects = accelerator.prepare(*built(seed=1))
    assert accelerator.load_state() == 3  # the project's, as Accelerate numbers them
    first = steps(accelerator, *objects, BATCHES[3:4])
    folder = accelerator.save_state()
    assert folder == tmp_path / "checkpoints" / "step-4"
    assert read_manifest(folder).step == 4
    resumed = Accelerator(cpu=True, project_dir=tmp_path)
    objects = resumed.prepare(*built(seed=2))
    assert resumed.load_state() == 4  # drivetrain's own now, beside the other
    assert first + steps(resumed, *objects, BATCHES[4:]) == expected


def test_nothing_of_the_run_lies_in_the_files_memory(tmp_path: Path) -> None:
    expected = trained(tmp_path, safe=False)
    accelerator = Accelerator(cpu=True)
    objects = accelerator.prepare(*built(seed=1))
    accelerator.load_state(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")  # a page of a mapped file that is cut off is a bus error
    assert steps(accelerator, *objects, BATCHES[3:]) == expected


def test_objects_are_matched_in_the_order_of_their_kind_whatever_models_they_belong_to(
    tmp_path: Path,
) -> None:
    models, optimizers, schedulers = zip(*(built(seed) for seed in (0, 1)), strict=True)
    for number, (one, *training) in enumerate(zip(models, optimizers, schedulers, strict=True)):
        plain_steps(one, *training, BATCHES[: number + 1])
    write_accelerate_state(
        tmp_path,
        models=[one.state_dict() for one in models],
        optimizers=[one.state_dict() for one in reversed(optimizers)],
        schedulers=[one.state_dict() for one in reversed(schedulers)],
    )
    accelerator = Accelerator(cpu=True)
    (a, of_a, after_a), (b, of_b, after_b) = built(2), built(3)
    prepared = accelerator.prepare(a, b, of_b, of_a, after_b, after_a)
    assert accelerator.load_state(tmp_path) == 2
    for found, expected in zip((a, b), models, strict=True):
        assert torch.equal(found[0].weight, expected[0].weight)
    assert [one.num_steps for one in prepared[2:4]] == [2, 1]
    assert [one.last_epoch for one in prepared[4:]] == [2, 1]
    assert torch.equal(
        of_b.state[b[0].weight]["exp_avg"], optimizers[1].state[models[1][0].weight]["exp_avg"]
    )


def test_an_optimizer_of_two_models_is_matched_over_both(tmp_path: Path) -> None:
    def both(seed: int):
        torch.manual_seed(seed)
        pair = nn.Linear(2, 3), nn.Linear(3, 1)
        return *pair, AdamW([*pair[1].parameters(), *pair[0].parameters()], lr=0.1)

    a, b, optimizer = both(0)
    b(a(BATCHES[0])).square().mean().backward()
    optimizer.step()
    write_accelerate_state(
        tmp_path, models=[a.state_dict(), b.state_dict()], optimizers=[optimizer.state_dict()]
    )
    accelerator = Accelerator(cpu=True)
    found_a, found_b, found = accelerator.prepare(*both(1))
    assert accelerator.load_state(tmp_path) == 1
    for one, expected in ((found_a, a), (found_b, b)):
        assert torch.equal(found.state[one.weight]["exp_avg"], optimizer.state[expected.weight]["exp_avg"])
    state = optimizer.state_dict()
    state["state"][0], state["state"][2] = state["state"][2], state["state"][0]
    torch.save(state, tmp_path / "optimizer.bin")
    with pytest.raises(ValueError, match=r"exp_avg of 1.weight is of shape \(3, 2\) in the checkpoint"):
        accelerator.load_state(tmp_path)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    trained(tmp_path / "from", scaler=scaler.state_dict())
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.prepare(*built())
    accelerator.load_state(tmp_path / "from")
    folder = accelerator.save_state(tmp_path / "to")
    saved = Checkpointer(accelerator.context, tmp_path / "to").load(folder).replicated["backend"]
    assert saved["scaler"] == {"scale": 64.0, "growth_tracker": 7}


def test_a_run_may_change_to_fp16(tmp_path: Path, caplog) -> None:
    trained(tmp_path)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.prepare(*built())
    assert "that run did not scale its loss: the scale starts at its initial value" in told(
        caplog, accelerator, tmp_path
    )


def told(caplog, accelerator: Accelerator, folder: Path) -> str:
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(folder)
    (record,) = caplog.records
    return record.getMessage()


def test_one_warning_tells_what_is_not_as_it_was(tmp_path: Path, caplog) -> None:
    trained(tmp_path, num_accumulated=12, scaler={"scale": 4.0, "_growth_tracker": 1}, world_size=3)
    (tmp_path / "sampler.bin").touch()
    accelerator = Accelerator(cpu=True, seed=5)
    accelerator.prepare(*built(), DataLoader(torch.arange(8), batch_size=2))
    said = told(caplog, accelerator, tmp_path)
    assert "taken over at step 3" in said
    assert "it had entered accumulate() 12 times in all" in said
    assert "accelerator.skip_first_batches(loader, number of batches)" in said
    assert "sampler.bin: not known" in said
    assert "scaler.pt: this run does not scale its loss" in said
    assert "saved with world size 3, resumed with 1: reseeded from seed 5" in said
    assert accelerator.plan.facts["random generators"].startswith("saved with world size 3")


def test_generators_are_reseeded_from_the_seed_that_the_program_set_itself(tmp_path: Path, caplog) -> None:
    trained(tmp_path, world_size=3)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*built())
    torch.manual_seed(42)
    assert "reseeded from seed 42 (torch.initial_seed() on rank 0, random where nothing is seeded)" in told(
        caplog, accelerator, tmp_path
    )
    drawn = torch.rand(1)
    torch.manual_seed(43)
    accelerator.load_state(tmp_path)
    assert torch.rand(1) != drawn


def test_a_schedule_that_ran_ahead_of_the_steps_is_told(tmp_path: Path, caplog) -> None:
    model, optimizer, scheduler = built()
    for batch in BATCHES[:2]:
        plain_steps(model, optimizer, scheduler, [batch])
        scheduler.step()
    write_accelerate_state(
        tmp_path,
        models=[model.state_dict()],
        optimizers=[optimizer.state_dict()],
        schedulers=[scheduler.state_dict()],
        loaders=[{"_num_yielded": 2}],
        world_size=2,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*built(), DataLoader(torch.arange(8), batch_size=2))
    said = told(caplog, accelerator, tmp_path)
    assert "a scheduler stands at 4 after 2 optimizer steps" in said
    assert "its loaders had given [2] batches of their epoch to each process" in said


def test_an_optimizer_without_a_count_of_steps_is_told(tmp_path: Path, caplog) -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    write_accelerate_state(tmp_path, models=[model.state_dict()], optimizers=[optimizer.state_dict()])
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    said = told(caplog, accelerator, tmp_path)
    assert "optimizer 0 keeps no count of its steps: they are counted from 0" in said
    assert "the place in the data" not in said  # there is no loader


def weights(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("optimizer.bin", {"state": {}, "param_groups": []}, "1 parameter groups"),
        ("optimizer_1.bin", {}, "does not hold what its name says"),
        ("scheduler_1.bin", {"last_epoch": 1}, "holds 2 schedulers, and this run has 1"),
        ("custom_checkpoint_0.pkl", {}, "holds 1 registered objects"),
        ("custom_checkpoint_0.pkl", {"a": Kept()}, "custom_checkpoint_0.pkl holds more"),
        ("model.safetensors", {}, "no whole safetensors file"),
        (None, None, "holds 0 registered objects, and this run has 1"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    tmp_path: Path, file: str | None, contents: object, message: str
) -> None:
    trained(tmp_path)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*built(seed=1))
    if file is None:
        accelerator.register_for_checkpointing(Kept())
    else:
        torch.save(contents, tmp_path / file)
    before = weights(model)
    with pytest.raises((ValueError, RuntimeError), match=message):
        accelerator.load_state(tmp_path)
    assert weights(model) == before
    assert (optimizer.num_steps, dict(optimizer.state), scheduler.last_epoch) == (0, {}, 0)


def test_another_model_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path)
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*built(seed=1, width=4))
    before = weights(model)
    with pytest.raises(
        ValueError, match=r"0.weight is of shape \(4, 2\), in the checkpoint \(3, 2\)|exp_avg of"
    ):
        accelerator.load_state(tmp_path)
    assert weights(model) == before


def test_parts_are_refused_with_a_way_out(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "optimizer_0").mkdir()
    (tmp_path / "optimizer_0" / "__0_0.distcp").touch()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*built())
    with pytest.raises(ForeignStateError, match="FULL_STATE_DICT"):
        accelerator.load_state(tmp_path)


def test_a_run_of_accelerate_itself_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate.state", reason="the peer is in the group bench")
    import accelerate

    other = accelerate.Accelerator(cpu=True)
    kept = Kept(5)
    other.register_for_checkpointing(kept)
    objects = other.prepare(*built())
    steps(other, *objects, BATCHES[:3])
    other.save_state(str(tmp_path))
    expected = steps(other, *objects, BATCHES[3:])
    accelerator = Accelerator(cpu=True)
    found = Kept()
    accelerator.register_for_checkpointing(found)
    objects = accelerator.prepare(*built(seed=1))
    assert accelerator.load_state(tmp_path) == 3
    assert steps(accelerator, *objects, BATCHES[3:]) == expected
    assert found.value == 5
