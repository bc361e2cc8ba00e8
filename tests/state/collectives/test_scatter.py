import pytest
import torch

from drivetrain_state import Context, StateSettings, Topology, connect, scatter


def _connect() -> Context:
    return connect(StateSettings(device="cpu", watchdog=False))


def _scatter_nested() -> tuple[object, ...]:
    context = _connect()
    data = None
    if context.topology.rank == 1:
        data = {
            "x": torch.arange(8, dtype=torch.int16).reshape(4, 2).t().contiguous().t(),
            "y": [torch.tensor([True, False]), None],
            "empty": torch.zeros(0, 3),
        }
    mine = scatter(context, data, src=1)
    return (
        mine["x"].tolist(),
        str(mine["x"].dtype),
        mine["y"][0].tolist(),
        mine["y"][1],
        tuple(mine["empty"].shape),
    )


def test_each_rank_gets_its_part_in_rank_order(run_ranks) -> None:
    assert run_ranks(_scatter_nested) == [
        ([[0, 1], [2, 3]], "torch.int16", [True], None, (0, 3)),
        ([[4, 5], [6, 7]], "torch.int16", [False], None, (0, 3)),
    ]


def _scatter_wrong() -> list[str]:
    context = _connect()
    messages: list[str] = []
    for data in (torch.zeros(3), torch.tensor(1.0), ["text"], None):
        try:
            scatter(context, data if context.topology.is_main else None)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_divided_is_an_error_on_every_rank(run_ranks) -> None:
    first, second = run_ranks(_scatter_wrong)
    assert first == second
    assert "shape (3,) cannot be divided among world_size=2" in first[0]
    assert "shape () cannot be divided" in first[1]
    assert "data[0] is of type str" in first[2]
    assert "the source rank passed None" in first[3]


def test_one_process_keeps_all() -> None:
    alone = Context(topology=Topology(), device=torch.device("cpu"))
    assert scatter(alone, {"x": torch.ones(3)})["x"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="src=2"):
        scatter(alone, torch.ones(1), src=2)
