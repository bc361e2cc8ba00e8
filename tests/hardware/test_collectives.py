"""Collectives, metrics and control objects where tensors are on devices."""

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from hardware.devices import runs_on_device

pytestmark = pytest.mark.as_tpu


@runs_on_device(2)
def test_ranks_talk_about_what_is_on_their_devices() -> None:
    accelerator = Accelerator()
    rank, place = accelerator.process_index, accelerator.device
    assert place.index == accelerator.local_process_index
    mine = torch.full((2,), float(rank), device=place)
    nested = accelerator.gather({"x": mine, "flag": mine > 0, "half": mine.half()})
    assert {value.device for value in nested.values()} == {place}
    assert nested["x"].tolist() == nested["half"].tolist() == [0, 0, 1, 1]
    assert nested["flag"].tolist() == [False, False, True, True]
    for op, number in (("sum", 1.0), ("mean", 0.5), ("max", 1.0), ("min", 0.0)):
        assert accelerator.reduce(mine, op).tolist() == [number] * 2
    assert accelerator.broadcast(mine, 1).tolist() == [1, 1]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=place))
    assert padded.tolist() == [1.0, float(rank)]
    assert (rank == 1) or not accelerator.check_trigger()
    if rank == 1:
        accelerator.check_trigger()
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    with accelerator.split_between_processes(torch.arange(5, device=place), apply_padding=True) as part:
        assert part.device == place
        assert part.tolist() == ([0, 1, 2] if rank == 0 else [3, 4, 4])
    with accelerator.main_process_first():
        pass
    accelerator.wait_for_everyone()
    found = 0
    for batch in accelerator.prepare(DataLoader(torch.arange(11), batch_size=2, pin_memory=True)):
        gathered = accelerator.gather_for_metrics({"x": batch, "y": batch * 2})
        assert gathered["x"].device == place
        assert torch.equal(gathered["x"] * 2, gathered["y"])
        assert gathered["x"].tolist() == list(range(found, min(found + 4, 11)))
        found += len(gathered["x"])
    assert found == 11
    accelerator.end_training()
