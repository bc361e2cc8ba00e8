"""Rows of the table "Where it differs" about what ranks read and gather of samples, on two ranks."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

from accelerate_sides import SIDES, said
from processes import RankPool

pytest.importorskip("accelerate")

Found = dict[str, Any]


@pytest.fixture(scope="module")
def by_rank(rank_pools: dict[int, RankPool], pythons: tuple[str, ...]) -> list[dict[str, Found]]:
    """Return what each rank found, by side and row."""
    pool = rank_pools.setdefault(2, RankPool(2, pythons=pythons))
    found: Any = pool.call(on_each_side, timeout_seconds=90)
    return found


def on_each_side() -> dict[str, Found]:
    found: dict[str, Found] = {}
    for side in SIDES:
        with side.accelerator() as accelerator:
            found[side.name] = {
                "drawn": said(lambda: of_own_data(accelerator)),
                "arrays": of_arrays(accelerator, lambda rows: rows),
                "nested": of_arrays(accelerator, lambda rows: {"rows": rows, "none": None}),
            }
    return found


def of_own_data(accelerator: Any) -> list[int]:
    """Return what a rank reads where each has drawn samples of its own."""
    own: Any = [100 * accelerator.process_index + number for number in range(4)]
    return [
        sample for batch in accelerator.prepare(DataLoader(own, batch_size=1)) for sample in batch.tolist()
    ]


def of_arrays(accelerator: Any, form: Any) -> list[Any]:
    numbers: Any = range(10)
    loader = accelerator.prepare(DataLoader(numbers, batch_size=4))
    return [accelerator.gather_for_metrics(form(batch.numpy())) for batch in loader]


def test_data_drawn_apart(by_rank: list[dict[str, Found]]) -> None:
    """a dataset that each process draws for itself, without a common seed"""
    assert [found["theirs"]["drawn"] for found in by_rank] == [[0, 2], [101, 103]]
    for found in by_rank:
        for side in ("ours", "restored"):
            assert "gives other samples on rank 1" in found[side]["drawn"]
            assert "draw random data with the same seed on every rank" in found[side]["drawn"]


def test_arrays(by_rank: list[dict[str, Found]]) -> None:
    """`gather_for_metrics` of NumPy arrays"""
    for found in by_rank:
        assert found["theirs"]["arrays"] == found["restored"]["arrays"] == [list(range(8)), [8, 9]]
        assert found["theirs"]["nested"] == [["rows", "none"] * 2, ["rows", "none"]]
        assert [each.tolist() for each in found["ours"]["arrays"]] == [list(range(8)), [8, 9]]
        nested = [(each["rows"].tolist(), each["none"]) for each in found["ours"]["nested"]]
        assert nested == [(list(range(8)), None), ([8, 9], None)]
