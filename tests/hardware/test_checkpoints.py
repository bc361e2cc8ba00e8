"""Checkpoints of what is on devices, while training goes on."""

import re
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_memory import record_peak
from hardware.devices import OnDevice, first, here, runs_on_device
from processes import run_script

pytestmark = pytest.mark.as_tpu


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
    assert copies.to_pinned >= 2 * here().copies_aside  # weight and bias
    num_waits = 1 if here().copies_aside else 2  # for all of them, or for each
    assert sum(" stage " in f"{wait} " for wait in found) == num_waits, "\n".join(found)
    del model
    accelerator.end_training()


class Tall(nn.Module):
    """Weights of 5 MiB here and 1.25 GiB on a card; with the moments of AdamW it is thrice that."""

    def __init__(self) -> None:
        super().__init__()
        width = 512 * here().scale
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def prepared(folder: Path, staging: str) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    sections = {"checkpoint": {"staging": staging}, "run": {"show_plan": False}}
    accelerator = Accelerator(project_dir=folder, sections=sections)
    with torch.device(first()):
        model = Tall()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return accelerator, model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = list(model.parameters())
    moments = [optimizer.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [each.detach() for each in (*parameters, *moments)]


@pytest.mark.parametrize("staging", ["copy", "overlap"])
@pytest.mark.default_cases("overlap")
@runs_on_device()
def test_much_is_saved_as_it_was_and_loaded_straight_to_the_device(folder: Path, staging: str) -> None:
    """Change everything at once while a save is in the background; another run loads what was before."""
    accelerator, model, optimizer = prepared(folder, staging)
    x = torch.randn(2, 512 * here().scale, device=first())
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    expected = [each.clone() for each in state_of(model, optimizer)]
    accelerator.backward(model(x).square().mean())
    accelerator.save_state(background=True)
    optimizer.step()  # at once, in place
    if staging == "copy":
        for each in state_of(model, optimizer):
            each.fill_(7)
    accelerator.wait_for_save()
    assert not torch.equal(next(model.parameters()), expected[0])
    accelerator.end_training()
    del accelerator, model, optimizer

    accelerator, model, optimizer = prepared(folder, staging)
    before = torch.accelerator.memory_allocated()
    with record_peak() as peak:
        accelerator.load_state()
    found = state_of(model, optimizer)
    assert {each.device for each in found} == {torch.device(first())}
    assert peak.devices[0].peak_bytes - before < sum(each.nbytes for each in found[5:]) + 2 * found[0].nbytes
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    accelerator.end_training()


def continues(folder: Path, backend: str, loads: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Begin a run and save it, or load one; the weights then, and after one more step."""
    accelerator = Accelerator(project_dir=folder, backend=backend, sections={"run": {"show_plan": False}})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 63), nn.Tanh(), nn.Linear(63, 5))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step() -> None:
        x = torch.linspace(-1, 1, 64 * 4, device=accelerator.device).view(4, 64)  # the same on every rank
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if loads:
        accelerator.load_state()
    else:
        step()
        step()
        accelerator.save_state()
    saved = weights(accelerator, model)
    step()
    after = weights(accelerator, model)
    accelerator.end_training()
    return saved, after


KILLED = """
import os, signal, sys, threading, time
import torch
from drivetrain import Accelerator
from hardware.devices import first, here

here().prepare()
folder, delay_share = sys.argv[1], float(sys.argv[2])
accelerator = Accelerator(project_dir=folder, sections={"run": {"show_plan": False}})
model = torch.nn.Linear(1024, 1024 * here().scale, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

def step():  # each adds 1 to every weight
    accelerator.backward(-model.weight.sum())
    optimizer.step()
    optimizer.zero_grad()

step()
begun = time.monotonic()
accelerator.save_state()
delay = delay_share * (time.monotonic() - begun)
print("saved", flush=True)
threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    step()
    accelerator.save_state(background=True)
    accelerator.wait_for_save()
"""


def loads_the_newest(folder: Path) -> int:
    accelerator = Accelerator(project_dir=folder, sections={"run": {"show_plan": False}})
    model = nn.Linear(1024, 1024 * here().scale, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step = accelerator.load_state()
    assert model.weight.device == accelerator.device
    assert model.weight.eq(step).all().item()
    accelerator.end_training()
    del optimizer
    return step


@pytest.mark.default_cases
def test_what_is_written_has_arrived_from_the_device(on_device: OnDevice, tmp_path: Path) -> None:
    for staging in ("copy", "overlap"):
        on_device(saves, tmp_path / staging, "single", staging)
    on_device(stages_in_pinned_memory, tmp_path / "b")


@pytest.mark.default_cases
def test_ranks_save_what_each_has_on_its_device(on_device: OnDevice, tmp_path: Path) -> None:
    for backend, staging in (("ddp", "copy"), ("ddp", "overlap"), ("fsdp", "overlap")):
        on_device(saves, tmp_path / backend / staging, backend, staging, num_processes=2)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases
def test_a_run_goes_on_at_another_number_of_ranks(on_device: OnDevice, backend: str, tmp_path: Path) -> None:
    for num_before, num_after in ((2, 1), (1, 2)):
        folder = tmp_path / str(num_before)
        results = [
            on_device(continues, folder, backend if num == 2 else "single", loads, num_processes=num)
            for num, loads in ((num_before, False), (num_after, True))
        ]
        ((saved, after), *_), ((loaded, further), *_) = results
        for name, value in saved.items():
            assert torch.equal(value, loaded[name]), name
            torch.testing.assert_close(after[name], further[name])


@pytest.mark.parametrize(
    "delay_share", [0.5, 1.5]
)  # of a save's time: in the first one after, or a later one
@pytest.mark.default_cases
def test_after_a_kill_in_a_save_the_newest_valid_checkpoint_loads(
    on_device: OnDevice,
    device: str,
    pythons: tuple[str, ...],
    tmp_path: Path,
    delay_share: float,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    (killed,) = run_script(
        script,
        str(tmp_path),
        str(delay_share),
        num_processes=1,
        timeout_seconds=120,
        environment={"TEST_DEVICE": device},
        pythons=pythons,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert re.search("^saved", killed.stdout, re.M)
    (step,) = on_device(loads_the_newest, tmp_path)
    assert step >= 1
