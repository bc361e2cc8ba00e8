from drivetrain_memory.leaks.findings import Leak, grown_holders, unexplained, with_graphs
from drivetrain_memory.leaks.measure import MemorySample
from drivetrain_memory.leaks.named_memory import GRAPH, Holding


def sample(step: int, heap: int, **more) -> MemorySample:
    return MemorySample(step=step, resident=0, heap_used=heap, heap_free=0, python_blocks=0, **more)


def test_what_grows_inside_growing_elements_counts_for_their_container() -> None:
    before = {
        ("a.b[*]", "Box"): Holding(2, 100),
        ("a.b[*].x", "Tensor"): Holding(2, 1000),
        ("c", "int"): Holding(1, 28),
    }
    after = {
        ("a.b[*]", "Box"): Holding(12, 600),
        ("a.b[*].x", "Tensor"): Holding(12, 6000),
        ("c", "int"): Holding(1, 32),
    }
    (leak,) = grown_holders(before, after, 10, least_rate=200)
    assert (leak.holder, leak.bytes_per_step, dict(leak.per_step)) == ("a.b", 550, {"Box": 1, "Tensor": 1})
    assert "a.b: +0.55 kB a step" in str(leak)


def test_a_list_of_numbers_is_no_leak() -> None:
    assert grown_holders({}, {("h[*]", "float"): Holding(10, 240)}, 10, least_rate=200) == []


def test_memory_that_no_object_explains_is_told_with_its_place() -> None:
    first = sample(0, 0, children={7: 10 << 20, 8: 1})
    last = sample(10, 1 << 20, children={7: 30 << 20, 8: 2}, pinned=4096, device_allocated=1 << 20)
    found = {one.kind: one for one in unexplained(first, last, [], workers={7: "worker 0 of a DataLoader"})}
    assert set(found) == {"worker", "pinned", "native", "device"}
    assert found["worker"].holder == "process 7 (worker 0 of a DataLoader)"
    assert found["worker"].bytes_per_step == 2 << 20
    assert found["native"].bytes_per_step == (1 << 20) / 10


def test_objects_explain_the_heap_and_pinned_memory_and_graphs_take_the_rest() -> None:
    first, last = sample(0, 0), sample(10, 1 << 20)
    whole = Leak(kind="objects", holder="a", bytes_per_step=(1 << 20) / 10)
    assert unexplained(first, last, [whole], workers={}) == []
    pinned = sample(10, 0, pinned=10 * 128 << 10)
    batches = Leak(kind="objects", holder="batches", bytes_per_step=65 << 10)
    assert unexplained(first, pinned, [batches], workers={}) == []
    graph = Leak(kind="objects", holder="losses", bytes_per_step=100.0, per_step={GRAPH: 5.0})
    named, others = with_graphs([graph], unexplained(first, last, [graph], workers={}))
    assert others == []
    assert named[0].bytes_per_step == (1 << 20) / 10
