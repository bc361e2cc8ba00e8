import torch

from drivetrain import Accelerator


def everything_between_ranks() -> dict[str, object]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 1:
        accelerator.set_trigger()
    with accelerator.split_between_processes(list("abcde")) as share:
        mine = list(share)
    return {
        "who": (rank, accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process),
        "gather": accelerator.gather({"x": torch.tensor([rank])})["x"].tolist(),
        "reduce": accelerator.reduce(torch.tensor(float(rank)), reduction="mean").item(),
        "broadcast": accelerator.broadcast(torch.tensor(rank + 5), from_process=1).item(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1)).tolist(),
        "triggers": [accelerator.check_trigger(), accelerator.check_trigger()],
        "share": mine,
        "main": accelerator.on_main_process(lambda: "main")(),
        "last": accelerator.on_last_process(lambda: "last")(),
        "one": accelerator.on_process(lambda: "one", 1)(),
    }


def test_every_rank_hears_the_others(run_ranks) -> None:
    first, second = run_ranks(everything_between_ranks)
    assert (first["who"], second["who"]) == ((0, 2, True, False), (1, 2, False, True))
    for found in (first, second):
        assert found["gather"] == [0, 1]
        assert found["reduce"] == 0.5
        assert found["broadcast"] == 6
        assert found["triggers"] == [True, False]
    assert (first["padded"], second["padded"]) == ([1.0, 0.0], [1.0, 1.0])
    assert first["share"] + second["share"] == list("abcde")
    assert (first["main"], second["main"]) == ("main", None)
    assert (first["last"], second["last"]) == (None, "last")
    assert (first["one"], second["one"]) == (None, "one")
