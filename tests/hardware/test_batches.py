"""Batches on their way to the device."""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import here


def reads_every_batch(pin_memory: bool, copy_ahead: int) -> None:
    accelerator = Accelerator(data={"copy_ahead": copy_ahead})
    data = TensorDataset(torch.arange(24.0)[:, None], torch.arange(24))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, pin_memory=pin_memory))
    with here().copies() as copies, here().waits() as found:
        got = [(x * 2, y + 1) for x, y in loader]
    assert found == []
    assert all(x.device == accelerator.device for x, _ in got)
    rank, count = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(24.0).view(-1, 4)[rank::count] if count > 1 else torch.arange(24.0).view(-1, 4)
    assert torch.equal(torch.cat([x for x, _ in got]).cpu().flatten(), 2 * mine.flatten())
    assert torch.equal(torch.cat([y for _, y in got]).cpu(), mine.flatten().long() + 1)
    assert copies.beside == (2 * len(got) if pin_memory and copy_ahead else 0)
    accelerator.end_training()


def reads_in_every_way() -> None:
    for pin_memory in (True, False):
        for copy_ahead in (0, 1, 3):
            reads_every_batch(pin_memory, copy_ahead)


def test_a_batch_is_there_when_the_loop_has_it_and_the_host_waits_for_none(
    on_device: Callable[..., list[object]],
) -> None:
    on_device(reads_in_every_way)


def test_each_rank_has_its_own_batches_on_its_own_device(
    on_device: Callable[..., list[object]],
) -> None:
    on_device(reads_every_batch, True, 1, num_processes=2)
