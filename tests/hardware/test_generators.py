"""The device's random numbers: seeded, kept in checkpoints, the same on all ranks where they are to be."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_state import connect, load_rng_state, rng_state, set_seed, synchronize_rng_states
from hardware.devices import OnDevice, runs_on_device

pytestmark = pytest.mark.as_tpu


def drawn(place: torch.device) -> list[float]:
    """Numbers of the host and of a device, drawn with and without a module."""
    dropped = nn.functional.dropout(torch.ones(16, device=place)).cpu()
    return [*torch.rand(2).tolist(), *torch.randn(3, device=place).tolist(), *dropped.tolist()]


@runs_on_device()
def test_the_devices_generator_is_seeded_and_restored(folder: Path) -> None:
    place = connect().device
    set_seed(7)
    first = drawn(place)
    state = rng_state()
    second = drawn(place)
    assert first != second
    load_rng_state(state)
    assert drawn(place) == second
    set_seed(7)
    assert drawn(place) == first
    set_seed(8)
    assert drawn(place)[2:5] != first[2:5]
    resumes(folder)


def resumes(folder: Path) -> None:
    accelerator = Accelerator(project_dir=folder, seed=3)
    model = accelerator.prepare(nn.Linear(2, 2))
    drawn(accelerator.device)
    accelerator.save_state()
    expected = drawn(accelerator.device)
    drawn(accelerator.device)
    accelerator.load_state()
    assert drawn(accelerator.device) == expected
    del model
    accelerator.end_training()


@runs_on_device(2)
def test_ranks_draw_apart_or_alike_and_resume_each_its_own(folder: Path) -> None:
    context = connect()
    set_seed(7, rank_offset=context.topology.rank)
    assert len(set(map(tuple, _by_rank(drawn(context.device))))) == 2
    synchronize_rng_states(context)
    assert len(set(map(tuple, _by_rank(drawn(context.device))))) == 1
    context.close()
    resumes(folder)
    return drawn(context.device)


def _by_rank(numbers: list[float]) -> list[list[float]]:
    gathered: list[list[float]] = [[], []]
    torch.distributed.all_gather_object(gathered, numbers)
    return gathered


def train_on(folder: Path, backend: str, stop_at: int | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train two shuffled epochs with dropout, saving in the middle of the first, or go on from there.

    Args:
        folder: Of the checkpoint.
        backend: The backend.
        stop_at: The step to save after; None to load what was saved.

    Returns:
        The losses of the steps after the save, and the weights at the end.
    """
    accelerator = Accelerator(backend=backend, seed=None if stop_at is None else 11, project_dir=folder)
    given = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))
    data = TensorDataset(torch.arange(6 * 32.0).view(32, 6) / 200)
    model, optimizer, loader = accelerator.prepare(
        given, torch.optim.AdamW(given.parameters(), lr=0.01), DataLoader(data, batch_size=2, shuffle=True)
    )
    step = 0
    if stop_at is None:
        accelerator.load_state()
    losses: list[Tensor] = []
    for _ in range(2):
        for (x,) in loader:
            loss = model(x + torch.rand_like(x)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step == stop_at:
                accelerator.save_state()
                losses.clear()
    weights = accelerator.get_state_dict(model, everywhere=True)
    found = {name: value.cpu().clone() for name, value in weights.items()}
    accelerator.end_training()
    return [loss.cpu() for loss in losses], found


def goes_on(folder: Path, backend: str) -> None:
    losses, weights = train_on(folder, backend, stop_at=3)
    torch.manual_seed(99)
    again, resumed = train_on(folder, backend, stop_at=None)
    assert len(losses) == len(again) > 8
    assert [loss.item() for loss in again] == [loss.item() for loss in losses]
    for name, value in weights.items():
        assert torch.equal(resumed[name], value), name


def test_a_run_goes_on_bit_for_bit_in_the_middle_of_an_epoch(on_device: OnDevice, tmp_path: Path) -> None:
    on_device(goes_on, tmp_path, "single")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases
def test_ranks_go_on_bit_for_bit_in_the_middle_of_an_epoch(
    on_device: OnDevice, backend: str, tmp_path: Path
) -> None:
    on_device(goes_on, tmp_path, backend, num_processes=2)
