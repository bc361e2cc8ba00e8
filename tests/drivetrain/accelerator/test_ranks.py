import pytest
import torch

from drivetrain import Accelerator


@pytest.mark.ranks(2)
def test_every_rank_hears_the_others() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 1:
        accelerator.set_trigger()
    assert (accelerator.num_processes, accelerator.is_main_process) == (2, rank == 0)
    assert accelerator.is_last_process == (rank == 1)
    assert accelerator.gather({"x": torch.tensor([rank])})["x"].tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor(float(rank)), reduction="mean").item() == 0.5
    assert accelerator.broadcast(torch.tensor(rank + 5), from_process=1).item() == 6
    assert accelerator.pad_across_processes(torch.ones(rank + 1)).tolist() == [[1.0, 0.0], [1.0, 1.0]][rank]
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    with accelerator.split_between_processes(list("abcde")) as share:
        assert list(share) == list(["abc", "de"][rank])
    assert accelerator.on_main_process(lambda: "main")() == ["main", None][rank]
    assert accelerator.on_last_process(lambda: "last")() == [None, "last"][rank]
    assert accelerator.on_process(lambda: "one", 1)() == [None, "one"][rank]
