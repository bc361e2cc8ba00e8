import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import (
    Context,
    StateSettings,
    Topology,
    connect,
    local_main_process_first,
    main_process_first,
    on_last_process,
    on_local_main_process,
    on_main_process,
    on_process,
    print_on_main,
    split_between_processes,
    split_for_process,
)


def _of(rank: int, world_size: int = 4, nodes: int = 2) -> Context:
    each = world_size // nodes
    topology = Topology(
        rank=rank,
        local_rank=rank % each,
        world_size=world_size,
        local_world_size=each,
        node_rank=rank // each,
        num_nodes=nodes,
    )
    return Context(topology=topology, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("decorator", "ranks"),
    [
        (on_main_process, [0]),
        (on_local_main_process, [0, 2]),
        (on_last_process, [3]),
        (lambda context: on_process(context, 1), [1]),
    ],
)
def test_decorated_functions_run_on_their_ranks_only(decorator, ranks: list[int]) -> None:
    ran: list[int] = []
    for rank in range(4):

        @decorator(_of(rank))
        def note(value: int, *, more: int = 0) -> int:
            """Note it."""
            ran.append(value)
            return value + more

        assert note(rank, more=10) == (rank + 10 if rank in ranks else None)
        assert note.__name__ == "note"
        assert note.__doc__ == "Note it."
    assert ran == ranks


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="index=4 with world_size=4"):
        on_process(_of(0), 4)


def test_print_speaks_once(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        print_on_main(_of(rank), "loss", 0.5, sep="=")
    assert capsys.readouterr().out == "loss=0.5\n"


def _connect() -> Context:
    return connect(StateSettings(device="cpu", watchdog=False))


def _find_what_the_first_wrote(folder: str, local: bool) -> bool:
    context = _connect()
    path = Path(folder) / "prepared"
    with local_main_process_first(context) if local else main_process_first(context):
        found = path.exists()
        if context.topology.is_main:
            time.sleep(0.2)  # the others would be through by now
            path.touch()
    return found


@pytest.mark.parametrize("local", [False, True])
def test_the_others_find_what_the_main_process_wrote(run_ranks, tmp_path: Path, local: bool) -> None:
    assert run_ranks(_find_what_the_first_wrote, str(tmp_path), local) == [False, True]


def _main_raises() -> str:
    context = _connect()
    try:
        with main_process_first(context):
            if context.topology.is_main:
                raise KeyError("no data")
            return "released"
    except KeyError:
        return "raised"


def test_the_others_are_released_when_the_main_process_raises(run_ranks) -> None:
    assert run_ranks(_main_raises) == ["raised", "released"]


@given(st.integers(0, 30), st.integers(1, 8))
def test_parts_are_contiguous_balanced_and_complete(length: int, count: int) -> None:
    items = list(range(length))
    parts = [split_for_process(items, index, count) for index in range(count)]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(map(len, parts), reverse=True) == list(map(len, parts))


@given(st.integers(1, 30), st.integers(1, 8))
def test_padding_makes_all_parts_equally_long_with_the_last_item(length: int, count: int) -> None:
    tensor = torch.arange(length)
    for index in range(count):
        plain = split_for_process(tensor, index, count).tolist()
        padded = split_for_process(tensor, index, count, apply_padding=True).tolist()
        assert len(padded) == -(-length // count)
        assert padded[: len(plain)] == plain
        assert set(padded[len(plain) :]) <= {length - 1}


def test_every_kind_of_input_keeps_its_type() -> None:
    inputs = {"text": ["a", "b", "c"], "pair": (1, 2, 3), "x": torch.arange(3), "deep": {"y": [4, 5, 6]}}
    with split_between_processes(_of(1, world_size=2, nodes=1), inputs, apply_padding=True) as mine:
        assert mine["text"] == ["c", "c"]
        assert mine["pair"] == (3, 3)
        assert mine["x"].tolist() == [2, 2]
        assert mine["deep"] == {"y": [6, 6]}


class Lines(Sequence[str]):
    """Lines of a file, say, whose parts are of the same class."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        return Lines(self.lines[index]) if isinstance(index, slice) else self.lines[index]


def test_sequences_and_arrays_of_any_kind_are_divided() -> None:
    def second_of_two(inputs: Any, padding: bool = False) -> Any:
        with split_between_processes(_of(1, world_size=2, nodes=1), inputs, padding) as mine:
            return mine

    lines = second_of_two(Lines(["a", "b", "c"]))
    assert isinstance(lines, Lines)
    assert lines.lines == ["c"]
    assert second_of_two(Lines(["a", "b", "c"]), True) == ["c", "c"]
    assert second_of_two(range(5)) == range(3, 5)
    assert second_of_two(deque([1, 2, 3])) == [3]
    array = np.arange(6).reshape(3, 2)
    assert second_of_two({"rows": array, "x": [1, 2, 3]})["rows"].tolist() == [[4, 5]]
    assert second_of_two(array, True).tolist() == [[4, 5], [4, 5]]


def test_fewer_items_than_processes_leave_the_last_ranks_empty() -> None:
    with split_between_processes(_of(3), ["only"]) as mine:
        assert mine == []
    with split_between_processes(_of(3), ["only"], apply_padding=True) as mine:
        assert mine == ["only"]


@pytest.mark.parametrize(
    ("inputs", "padding", "message"),
    [
        ({"a": [1], "b": [1, 2]}, False, r"different lengths, {'a': 1, 'b': 2}"),
        ("text", False, "inputs of type str: a list"),
        (b"text", False, "inputs of type bytes: a list"),
        ({1, 2}, False, "inputs of type set: a list"),
        (np.array(1), False, "inputs of type ndarray: a list"),
        (torch.tensor(1), False, "inputs of type Tensor: a list"),
        ([], True, "empty inputs"),
    ],
)
def test_what_cannot_be_split_is_refused(inputs: object, padding: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message), split_between_processes(_of(0), inputs, padding):
        pass
