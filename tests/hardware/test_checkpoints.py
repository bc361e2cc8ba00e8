"""Checkpoints of what is on devices, while training goes on."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from drivetrain import Accelerator
from hardware.devices import here


def saves(folder: Path, backend: str, staging: str) -> None:
    sections = {"checkpoint": {"staging": staging}}
    accelerator = Accelerator(project_dir=folder, backend=backend, sections=sections)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 64, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for background in (True, False, True):
        step()
        expected = weights(accelerator, model)
        with here().waits() as found:
            accelerator.save_state(background=background)
        if background and staging == "overlap":
            of_training = [
                wait for wait in found if " run " not in f"{wait} "
            ]  # not of the thread that copies
            assert not any("copy" in wait or "stage" in wait for wait in of_training), "\n".join(of_training)
        step()  # in place, on what is being saved
        step()
        accelerator.load_state()
        assert {parameter.device for parameter in model.parameters()} == {accelerator.device}
        for name, value in weights(accelerator, model).items():
            assert torch.equal(value, expected[name]), name
        for state in optimizer.state.values():
            assert state["exp_avg"].device == accelerator.device
    accelerator.end_training()


def weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    whole = accelerator.get_state_dict(model, everywhere=True)
    return {name: value.cpu().clone() for name, value in whole.items()}


def stages_in_pinned_memory(folder: Path) -> None:
    accelerator = Accelerator(project_dir=folder)
    model = accelerator.prepare(nn.Linear(300, 300))
    with here().copies() as copies:
        with here().waits() as found:
            accelerator.save_state(background=True)
        accelerator.wait_for_save()
    assert copies.to_pinned >= 2  # weight and bias
    assert sum("stage" in wait for wait in found) == 1, "\n".join(found)  # one wait for all of them
    del model
    accelerator.end_training()


def test_what_is_written_has_arrived_from_the_device(
    on_device: Callable[..., list[object]], tmp_path: Path
) -> None:
    for staging in ("copy", "overlap"):
        on_device(saves, tmp_path / staging, "single", staging)
    on_device(stages_in_pinned_memory, tmp_path / "b")


def test_ranks_save_what_each_has_on_its_device(
    on_device: Callable[..., list[object]], tmp_path: Path
) -> None:
    for backend, staging in (("ddp", "copy"), ("ddp", "overlap"), ("fsdp", "overlap")):
        on_device(saves, tmp_path / backend / staging, backend, staging, num_processes=2)
