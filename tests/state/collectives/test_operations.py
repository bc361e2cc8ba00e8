from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from drivetrain_state import (
    CollectiveMismatchError,
    Context,
    LeafError,
    StateSettings,
    Topology,
    barrier,
    broadcast,
    broadcast_object,
    connect,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from drivetrain_state.collectives.operations import gather_rows

Pair = namedtuple("Pair", ["left", "right"])

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@dataclass(frozen=True, slots=True)
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None
    derived: torch.Tensor = field(init=False, default_factory=lambda: torch.zeros(1))


class Encoding(UserDict):  # as tokenizers return: a mapping with an attribute of its own
    note = "class"


def _connect(*, debug: bool = False) -> Context:
    return connect(StateSettings(device="cpu", watchdog=False, debug=debug))


def _alone() -> Context:
    return Context(topology=Topology(), device=torch.device("cpu"))


def _fails(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def _gather_each_dtype() -> list[tuple[str, bool]]:
    context = _connect()
    rank, world_size = context.topology.rank, context.topology.world_size
    data = {str(dtype): torch.tensor([[rank, 1]]).to(dtype) for dtype in DTYPES}
    expected = torch.tensor([[other, 1] for other in range(world_size)])
    gathered = gather(context, data)
    return [
        (name, value.dtype == data[name].dtype and torch.equal(value, expected.to(value.dtype)))
        for name, value in gathered.items()
    ]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_gather_takes_every_dtype(run_ranks, num_processes: int) -> None:
    for answers in run_ranks(_gather_each_dtype, num_processes=num_processes):
        assert [name for name, right in answers if not right] == []


def _gather_odd_shapes() -> dict[str, object]:
    context = _connect()
    rank = context.topology.rank
    data = {
        "zero_dim": torch.tensor(float(rank)),
        "empty": torch.zeros(0, 3),
        "transposed": (torch.arange(6).reshape(2, 3) + 10 * rank).t(),
        "strided": torch.arange(10)[::5] + rank,
        "expanded": torch.tensor([rank]).expand(2),
        "trained": torch.ones(1, requires_grad=True),
        "conjugate": torch.tensor([1 + 1j * rank]).conj(),
    }
    return {
        name: (tuple(value.shape), value.requires_grad, value.tolist())
        for name, value in gather(context, data).items()
    }


def test_gather_takes_every_layout(run_ranks) -> None:
    for answer in run_ranks(_gather_odd_shapes):
        assert answer == {
            "zero_dim": ((2,), False, [0.0, 1.0]),
            "empty": ((0, 3), False, []),
            "transposed": ((6, 2), False, [[0, 3], [1, 4], [2, 5], [10, 13], [11, 14], [12, 15]]),
            "strided": ((4,), False, [0, 5, 1, 6]),
            "expanded": ((4,), False, [0, 0, 1, 1]),
            "trained": ((2,), False, [1.0, 1.0]),
            "conjugate": ((2,), False, [1 - 0j, 1 - 1j]),
        }


def _gather_nested() -> dict[str, list[int]]:
    context = _connect()
    assert gather(context, torch.zeros(3, 0)).shape == (6, 0)  # nothing but an empty tensor
    mine = torch.tensor([context.topology.rank])
    encoding = Encoding(ids=mine)
    encoding.note = "mine"
    data = {
        "list": [mine, (mine, None)],
        "pair": Pair(mine, [mine]),
        "ordered": OrderedDict(b=mine, a=mine),
        "default": defaultdict(list, x=mine),
        "encoding": encoding,
        "view": MappingProxyType({"y": mine}),
        "output": Output(mine, (mine, mine)),
        3: {},
    }
    whole = gather(context, data)
    both = [0, 1]
    assert list(whole) == list(data)
    assert whole["list"][0].tolist() == both
    assert whole["list"][1][0].tolist() == both
    assert whole["list"][1][1] is None
    assert type(whole["pair"]) is Pair
    assert whole["pair"].right[0].tolist() == both
    assert type(whole["ordered"]) is OrderedDict
    assert list(whole["ordered"]) == ["b", "a"]
    assert whole["default"].default_factory is list
    assert type(whole["encoding"]) is Encoding
    assert whole["encoding"].note == "mine"
    assert whole["encoding"]["ids"].tolist() == both
    assert whole["view"]["y"].tolist() == both
    assert whole["output"].hidden[1].tolist() == both
    assert whole["output"].derived.tolist() == [0, 0]
    assert data["encoding"]["ids"] is mine
    items = [("a", torch.tensor([1])), ("b", torch.tensor([2]))]
    ordered = dict(items if context.topology.is_main else reversed(items))
    return {name: value.tolist() for name, value in gather(context, ordered).items()}


def test_gather_keeps_every_kind_of_structure_and_the_order_of_keys_does_not_matter(run_ranks) -> None:
    assert run_ranks(_gather_nested) == [{"a": [1, 1], "b": [2, 2]}] * 2


def _count_collectives() -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    context = _connect()
    data = [torch.zeros(3, 2) for _ in range(20)] + [torch.zeros(2, dtype=torch.int64) for _ in range(5)]
    counts: dict[str, int] = {}
    calls = {
        "gather": lambda: gather(context, data),
        "gather uneven": lambda: gather(context, data, uneven=True),
        "reduce": lambda: reduce(context, data),
        "broadcast": lambda: broadcast(context, data),
        "pad": lambda: pad_across_processes(context, data),
    }
    for name, call in calls.items():
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        events = [event for event in seen.events() if event.name.startswith("c10d::")]
        counts[name] = len(events)
    return counts


def test_one_collective_a_dtype_and_one_exchange_of_shapes_where_they_may_differ(run_ranks) -> None:
    for counts in run_ranks(_count_collectives):
        assert counts == {"gather": 2, "gather uneven": 3, "reduce": 2, "broadcast": 2, "pad": 1}


def _gather_uneven() -> tuple[dict[str, list[object]], dict[str, list[int]], str]:
    context = _connect()
    rank = context.topology.rank
    refused = _fails(gather, context, {"x": torch.zeros(2, 3 + rank)}, uneven=True)
    data = {
        "rows": torch.full((rank + 1, 2), rank),
        "scores": torch.full((2 * rank,), float(rank)),
        "same": (part := torch.tensor([rank] * rank, dtype=torch.int64)),
        "again": part if rank == 0 else torch.tensor([7, 7, 7]),
        "loss": torch.tensor(0.5 + rank),
    }
    whole = gather(context, data, uneven=True)
    gathered, rows = gather_rows(context, data)
    assert all(torch.equal(gathered[name], whole[name]) for name in data)
    plain, counts = ({name: each.tolist() for name, each in of.items()} for of in (whole, rows))
    return plain, counts, refused


def test_uneven_gather_concatenates_what_there_is_and_counts_the_rows_of_each_rank(run_ranks) -> None:
    for answer, rows, refused in run_ranks(_gather_uneven):
        assert answer == {
            "rows": [[0, 0], [1, 1], [1, 1]],
            "scores": [1.0, 1.0],
            "same": [1],
            "again": [7, 7, 7],
            "loss": [0.5, 1.5],
        }
        assert rows == {"rows": [1, 2], "scores": [0, 2], "same": [0, 1], "again": [0, 3], "loss": [1, 1]}
        assert "data['x']" in refused
        assert "rank 0: (2, 3); rank 1: (2, 4). Use pad_across_processes" in refused


def test_gather_in_one_process_gives_the_shapes_of_many() -> None:
    gathered = gather(_alone(), {"loss": torch.tensor(2.0, requires_grad=True), "x": torch.zeros(2, 3)})
    assert gathered["loss"].shape == (1,)
    assert not gathered["loss"].requires_grad
    assert gathered["x"].shape == (2, 3)
    _, rows = gather_rows(_alone(), {"loss": torch.tensor(2.0), "x": torch.zeros(2, 3)})
    assert {name: count.tolist() for name, count in rows.items()} == {"loss": [1], "x": [2]}


@pytest.mark.parametrize(
    ("data", "path", "kind"),
    [
        ({"a": {"b": ["text"]}}, r"data\['a'\]\['b'\]\[0\]", "of type str"),
        ([torch.zeros(1), 3.0], r"data\[1\]", "of type float"),
        (Output(logits=2), r"data\.logits", "of type int"),  # type: ignore[arg-type]
        ("text", "data", "of type str"),
        ({"x": torch.eye(2).to_sparse()}, r"data\['x'\]", "a sparse tensor"),
    ],
)
def test_what_is_no_tensor_is_named_with_its_path(data: object, path: str, kind: str) -> None:
    with pytest.raises(LeafError, match=f"{path} is {kind}: dense tensors are allowed.*gather_object"):
        gather(_alone(), data)


def _reduce_each_dtype() -> list[str]:
    context = _connect()
    rank = context.topology.rank
    wrong: list[str] = []
    for dtype in DTYPES:
        for op, expected in (("sum", 3), ("mean", 1.5), ("max", 2), ("min", 1)):
            if dtype == torch.bool and op == "min":
                expected = 1
            data = torch.tensor([rank + 1, rank + 1]).to(dtype)
            numeric = dtype.is_floating_point or dtype.is_complex
            if (op == "mean" and not numeric) or (op == "sum" and dtype == torch.bool):
                continue
            if op in ("max", "min") and dtype.is_complex:
                continue
            value = reduce(context, {"x": data}, op)["x"]
            if value.dtype != dtype or not torch.equal(value, torch.tensor([expected] * 2).to(dtype)):
                wrong.append(f"{op} {dtype}: {value}")
    return wrong


def test_reduce_takes_every_dtype_that_has_an_answer(run_ranks) -> None:
    assert run_ranks(_reduce_each_dtype) == [[], []]


def _reduce_nested() -> tuple[object, ...]:
    context = _connect()
    rank = context.topology.rank
    data = {"loss": torch.tensor(float(rank)), "count": [torch.tensor([rank + 1])], "none": None}
    before = data["loss"].clone()
    summed = reduce(context, data)
    assert torch.equal(data["loss"], before)
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert reduce(context, large, "mean").item() == 60000.0  # the sum overflows
    return summed["loss"].shape, summed["loss"].item(), summed["count"][0].tolist(), summed["none"]


def test_reduce_keeps_structure_shapes_and_input_and_a_mean_of_halves_does_not_overflow(run_ranks) -> None:
    assert run_ranks(_reduce_nested) == [((), 1.0, [3], None)] * 2


@pytest.mark.parametrize(
    ("data", "op", "message"),
    [
        (torch.tensor([1]), "mean", "op='mean' of torch.int64: convert to a float"),
        (torch.tensor([True]), "sum", "op='sum' of torch.bool: convert"),
        (torch.tensor([1j]), "max", "op='max' of torch.complex64: complex"),
        (torch.tensor([1.0]), "avg", "op='avg': say one of sum, mean, max, min"),
    ],
)
def test_reductions_without_an_answer_are_refused_in_one_process_too(data, op, message) -> None:
    with pytest.raises(ValueError, match=message):
        reduce(_alone(), data, op)


def _broadcast_from_last() -> dict[str, object]:
    context = _connect()
    rank = context.topology.rank
    data = {
        "x": torch.full((2,), rank),
        "h": torch.tensor(rank, dtype=torch.int16),
        "b": torch.tensor(rank == 1),
    }
    received = broadcast(context, data, src=1)
    return {name: (str(value.dtype), value.tolist()) for name, value in received.items()}


def test_broadcast_gives_every_rank_what_one_has(run_ranks) -> None:
    expected = {"x": ("torch.int64", [1, 1]), "h": ("torch.int16", 1), "b": ("torch.bool", True)}
    assert run_ranks(_broadcast_from_last) == [expected, expected]


def _objects() -> tuple[object, ...]:
    context = _connect()
    rank = context.topology.rank
    barrier(context)
    return gather_object(context, {"rank": rank}), broadcast_object(context, f"from {rank}", src=1)


def test_objects_travel(run_ranks) -> None:
    assert run_ranks(_objects) == [([{"rank": 0}, {"rank": 1}], "from 1")] * 2


def test_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="src=1 with world_size=1"):
        broadcast(_alone(), torch.zeros(1), src=1)
    with pytest.raises(ValueError, match="src=-1 with world_size=1"):
        broadcast_object(_alone(), None, src=-1)


def test_in_one_process_nothing_is_sent() -> None:
    context = _alone()
    assert gather_object(context, "x") == ["x"]
    assert broadcast_object(context, "x") == "x"
    assert torch.equal(broadcast(context, torch.ones(2)), torch.ones(2))
    assert torch.equal(reduce(context, torch.ones(2), "mean"), torch.ones(2))
    barrier(context)
    assert context.progress.count == 0


def _pad(dim: int, pad_first: bool) -> dict[str, object]:
    context = _connect()
    rank = context.topology.rank
    data = {"x": torch.full((1 + rank, 2 - rank), rank), "scalar": torch.tensor(rank), "row": torch.ones(1)}
    padded = pad_across_processes(context, data, dim=dim, pad_index=-1, pad_first=pad_first)
    return {name: value.tolist() for name, value in padded.items()}


@pytest.mark.parametrize(
    ("dim", "first", "expected"),
    [(0, False, ([[0, 0], [-1, -1]], [[1], [1]])), (-1, True, ([[0, 0]], [[-1, 1], [-1, 1]]))],
)
def test_padding_fills_up_to_the_longest_along_any_dimension(run_ranks, dim, first, expected) -> None:
    assert run_ranks(_pad, dim, first) == [
        {"x": x, "scalar": rank, "row": [1.0]} for rank, x in enumerate(expected)
    ]


def _mismatches() -> dict[str, str]:
    context = _connect(debug=True)
    rank = context.topology.rank
    x = torch.zeros(2, 3)
    return {
        "shape": _fails(gather, context, {"x": torch.zeros(2 + rank, 3)}),
        "dtype": _fails(reduce, context, [torch.zeros(1, dtype=torch.float64 if rank else torch.float32)]),
        "structure": _fails(broadcast, context, {"x": x} if rank else {"x": x, "y": x}),
        "leaf": _fails(gather, context, "text" if rank else x),
        "op": _fails(reduce, context, x, "max" if rank else "sum"),
        "call": _fails(gather, context, x) if rank else _fails(barrier, context),
        "trailing": _fails(gather, context, torch.zeros(1, 2 + rank), uneven=True),
        "uneven is fine": _fails(gather, context, torch.zeros(1 + rank, 2), uneven=True),
        "equal is fine": _fails(gather, context, x),
        "after": str(dist.get_rank() == rank),
    }


def test_debug_mode_shows_what_each_rank_holds(run_ranks) -> None:
    for answers in run_ranks(_mismatches):
        for name in ("shape", "dtype", "structure", "leaf", "op", "call", "trailing"):
            assert answers[name].startswith(CollectiveMismatchError.__name__), (name, answers[name])
            assert "rank 0: " in answers[name]
            assert "rank 1: " in answers[name]
        assert "rank 0: gather(uneven=False) of data['x']: float32 (2, 3)" in answers["shape"]
        assert "rank 1: gather(uneven=False) of data['x']: float32 (3, 3)" in answers["shape"]
        assert "rank 0: barrier\n" in answers["call"]
        assert answers["uneven is fine"] == answers["equal is fine"] == "nothing raised"


def _marks() -> list[str]:
    context = _connect()
    labels: list[str] = []
    x = torch.ones(1)
    for call in (gather, reduce, broadcast, pad_across_processes, gather_object, broadcast_object):
        before = context.progress.count
        call(context, x)
        labels.append(f"{context.progress.label} {context.progress.count - before}")
    return labels


def test_every_collective_marks_its_begin_and_end(run_ranks) -> None:
    assert run_ranks(_marks)[0] == [
        "gather done 2",
        "reduce done 2",
        "broadcast done 2",
        "pad_across_processes done 2",
        "gather_object done 2",
        "broadcast_object done 2",
    ]
