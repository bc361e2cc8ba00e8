import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain import Accelerator
from drivetrain_data import TrimError, UnpreparedLoaderError


class Trained:
    """Holds a loader as trainers do."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self.accelerator = accelerator
        self.loader = loader

    def evaluate(self) -> list[int]:
        return [n for _, b in enumerate(self.loader) for n in self.accelerator.gather_for_metrics(b).tolist()]


def gather_all(accelerator: Accelerator, batches: Iterable[Any], **options: Any) -> list[int]:
    """What a helper of the user's gathers."""
    found: list[int] = []
    for batch in batches:
        found += accelerator.gather_for_metrics(batch, **options).tolist()
    return found


def refused(evaluate: Callable[[], object]) -> str:
    try:
        evaluate()
    except UnpreparedLoaderError as error:
        return str(error)
    return "nothing was raised"


def gathered_over_unprepared_loaders() -> list[str]:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    forgotten = DataLoader(torch.arange(9), batch_size=3)
    loaders = {"eval": forgotten}

    def inside_a_training_loop() -> None:
        for _ in prepared:
            gather_all(accelerator, forgotten)

    def inline() -> None:
        for batch in DataLoader(torch.arange(9), batch_size=3): accelerator.gather_for_metrics(batch)  # fmt: skip # noqa: E701

    def of_a_dict() -> None:
        for batch in tqdm(loaders["eval"]):
            texts = [str(int(number)) for number in batch]
            accelerator.gather_for_metrics(texts, use_gather_object=True)

    before = refused(lambda: gather_all(accelerator, forgotten))
    gather_all(accelerator, prepared)
    return [
        before,
        refused(lambda: gather_all(accelerator, forgotten)),  # after a loop over a prepared one
        refused(inside_a_training_loop),
        refused(inline),
        refused(of_a_dict),
        refused(Trained(accelerator, forgotten).evaluate),
    ]


def tqdm(batches: Iterable[Any]) -> Iterable[Any]:
    """Stands for the bar."""
    return batches


def test_a_loop_over_an_unprepared_loader_is_refused_with_its_line(run_ranks) -> None:
    for said in run_ranks(gathered_over_unprepared_loaders):
        heads = ["batches"] * 3 + [
            r"DataLoader\(.*\)",
            r"tqdm\(loaders\['eval'\]\)",
            r"enumerate\(self.loader\)",
        ]
        for head, message in zip(heads, said, strict=True):
            pattern = rf"in the loop over `{head}` \(\S*test_metrics.py:\d+\), which is a DataLoader .* not prepared"
            assert re.search(pattern, message), message
            assert "gather() joins their rows as they are" in message


@pytest.mark.ranks(2)
def test_what_is_gathered_rightly_stays() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    data = torch.arange(8)
    prepared = accelerator.prepare(DataLoader(data, batch_size=2))
    own_part = DataLoader(data[rank::2], batch_size=2)
    parts = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=False)
    # Each sample once: prepared loaders however they are read, loaders that divide the data, plain gather.
    assert sorted(gather_all(accelerator, prepared)) == list(range(8))
    assert sorted(gather_all(accelerator, accelerator.skip_first_batches(prepared, 1))) == [4, 5, 6, 7]
    assert sorted(Trained(accelerator, prepared).evaluate()) == list(range(8))
    assert sorted(gather_all(accelerator, DataLoader(data, sampler=parts))) == list(range(8))  # pyright: ignore[reportArgumentType]
    assert sorted(n for b in own_part for n in accelerator.gather(b).tolist()) == list(range(8))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    collected = []
    with accelerator.join_uneven_inputs([model]):
        for batch in own_part:
            assert len(accelerator.gather_for_metrics(batch)) == 4
            collected.append(batch)
    # After the loop, for numbers, and where the loader is named.
    assert sorted(accelerator.gather_for_metrics(torch.cat(collected)).tolist()) == list(range(8))
    for batch in own_part:
        assert accelerator.gather_for_metrics(batch.float().mean()).shape == (2,)
        assert accelerator.gather_for_metrics({"n": 1.0}) == [{"n": 1.0}] * 2
        assert len(accelerator.gather_for_metrics(batch, loader=prepared)) == 4
    # A prepared loader is the innermost one that is read.
    for _ in range(len(own_part)):
        assert sorted(gather_all(accelerator, prepared)) == list(range(8))
    for _ in own_part:
        assert sorted(gather_all(accelerator, prepared)) == list(range(8))
    accelerator.end_training()


def test_one_process_gathers_over_any_loader() -> None:
    loader = DataLoader(torch.arange(5), batch_size=2)
    assert gather_all(Accelerator(cpu=True), loader) == list(range(5))


class Named(NamedTuple):
    rows: Any
    label: Any


def gathered_arrays() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, seed=0)
    loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
    found: dict[str, list[Any]] = {}

    def keep(name: str, data: Any) -> None:
        found.setdefault(name, []).append(accelerator.gather_for_metrics(data))

    for batch in loader:
        rows = batch.numpy()
        keep("rows", rows)
        keep("reversed", rows[::-1][::-1])
        keep("wide", np.stack([rows, rows], axis=1))
        keep("texts", np.array([str(row) for row in rows]))
        keep("objects", np.array([None, *rows], dtype=object)[1:])
        keep("masked", np.ma.array(rows, mask=rows % 2 == 0))
        keep("nested", {"b": (rows, batch), "a": Named(batch * 2, rows > 3), "none": None})
        keep("single", np.array(1.5))
        keep("scalars", list(rows.astype(np.float32)))
        keep("by sample", [row * np.ones(int(row)) for row in rows])
        keep("kept", rows[rows % 2 == 0])
    try:
        keep("shapes", np.ones((1, 1 + accelerator.process_index)))
    except TrimError as error:
        found["refused"] = [str(error)]
    return found


def test_arrays_are_gathered_by_sample(run_ranks) -> None:
    first, second = run_ranks(gathered_arrays)
    assert repr(first) == repr(second)

    def joined(name: str) -> Any:
        assert all(type(part) is np.ndarray for part in first[name])
        return np.concatenate(first[name])

    for name in ("rows", "reversed", "objects"):
        assert joined(name).tolist() == list(range(7)), name
    assert joined("wide").tolist() == [[row, row] for row in range(7)]
    assert joined("texts").tolist() == list("0123456")
    assert joined("kept").tolist() == [0, 2, 4, 6]
    assert np.ma.concatenate(first["masked"]).tolist() == [None, 1, None, 3, None, 5, None]
    assert joined("single").tolist() == [1.5] * 4  # one for each rank of each step
    assert [float(row) for part in first["scalars"] for row in part] == list(range(7))
    assert [len(row) for part in first["by sample"] for row in part] == list(range(7))
    for part, expected in zip(first["nested"], [range(4), range(4, 7)], strict=True):
        assert isinstance(part["a"], Named)
        assert part["a"].rows.tolist() == [2 * row for row in expected]
        assert part["a"].label.tolist() == [row > 3 for row in expected]
        assert [rows.tolist() for rows in part["b"]] == [list(expected)] * 2
        assert isinstance(part["b"][1], torch.Tensor)
        assert part["none"] is None
    assert (
        "the ranks gave arrays of shapes (1, 1), (1, 2): only the first dimension may differ"
        in first["refused"][0]
    )
