"""Each position is held once, and every rank has the same work under a causal mask."""

import pytest
import torch

from drivetrain_parallel.sequences.positions import SequenceCut


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_position_has_one_place(size: int) -> None:
    for length in range(1, 40):
        cut = SequenceCut(length=length, size=size)
        held = [cut.positions(rank) for rank in range(size)]
        assert {len(one) for one in held} == {cut.own_length}
        assert torch.equal(torch.cat(held), cut.all_positions)
        assert cut.all_positions[cut.order].tolist() == list(range(length))
        for rank, one in enumerate(held):
            listed = [position for start, stop in cut.chunks(rank) for position in range(start, stop)]
            assert [position for position in one.tolist() if position < length - 1] == [
                position for position in listed if position < length - 1
            ]


def test_ranks_have_equal_work() -> None:
    cut = SequenceCut(length=64, size=4)
    assert len({int((cut.positions(rank) + 1).sum()) for rank in range(4)}) == 1
