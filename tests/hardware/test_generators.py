"""The device's random numbers: seeded, kept in checkpoints, the same on all ranks where they are to be."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_state import connect, load_rng_state, rng_state, set_seed, synchronize_rng_states


def drawn(place: torch.device) -> list[float]:
    """Numbers of the host and of a device, drawn with and without a module."""
    dropped = nn.functional.dropout(torch.ones(16, device=place)).cpu()
    return [*torch.rand(2).tolist(), *torch.randn(3, device=place).tolist(), *dropped.tolist()]


def seeds_and_restores() -> None:
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


def agrees(folder: Path) -> list[float]:
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


def test_the_devices_generator_is_seeded_and_restored(
    on_device: Callable[..., list[object]], tmp_path: Path
) -> None:
    on_device(seeds_and_restores)
    on_device(resumes, tmp_path)


def test_ranks_draw_apart_or_alike_and_resume_each_its_own(
    on_device: Callable[..., list[object]], tmp_path: Path
) -> None:
    on_device(agrees, tmp_path, num_processes=2)
