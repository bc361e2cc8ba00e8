"""The growth between two moments: named objects, child processes, and memory that no object explains (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drivetrain_memory.leaks.cycles import TensorCycle
from drivetrain_memory.leaks.growth import Growth
from drivetrain_memory.leaks.measure import MemorySample
from drivetrain_memory.leaks.named_memory import GRAPH, Census, Holding

Kind = Literal["objects", "worker", "pinned", "native", "device"]
_EACH_STEP = 0.4  # of an object for each step: what a user adds at every second step counts
_LEAST_CHILD_TOTAL = 1 << 20
_LEAST_NATIVE_TOTAL = 1 << 16
_LEAST_HEAP_TOTAL = 8 << 10
_LEAST_RESIDENT_TOTAL = 4 << 20
_LEAST_BLOCKS = 3  # of Python's allocator for each step: a number that is kept takes one


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows at every step.

    Attributes:
        kind: "objects" that a name holds, a "worker" or another child process, "pinned" host memory, memory of
            "native" code in the heap, or of the "device" without a Python object.
        holder: The name that holds the objects, or the process or place that grows.
        per_step: The number of objects of each type that each step adds.
        line: The user's line that made the newest of the objects; None if allocations were not traced.
        samples: The newest objects; empty once the report is made.
    """

    kind: Kind
    holder: str
    bytes_per_step: float
    per_step: Mapping[str, float] = field(default_factory=dict[str, float])
    line: str | None = None
    samples: Sequence[Any] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        objects = ", ".join(f"{count:+.3g} {name}" for name, count in list(self.per_step.items())[:4])
        made = f"\n    made at {self.line}" if self.line else ""
        size = f"{self.bytes_per_step / 1e3:+.2f} kB a step"
        return f"{self.holder}: {size}{f' ({objects})' if objects else ''}{made}"


def has_grown(before: MemorySample, after: MemorySample, least_rate: float) -> bool:
    """Return whether memory grew between two samples that were taken after collections of garbage."""
    steps = after.step - before.step
    heap = (after.heap_used or 0) - (before.heap_used or 0)
    children = [size - before.children.get(pid, size) for pid, size in after.children.items()]
    return (
        heap > max(least_rate * steps, _LEAST_HEAP_TOTAL)
        or after.python_blocks - before.python_blocks >= _LEAST_BLOCKS * steps
        or after.resident - before.resident >= _LEAST_RESIDENT_TOTAL
        or after.device_allocated > before.device_allocated
        or after.pinned > before.pinned
        or sum(children) >= _LEAST_CHILD_TOTAL
    )


def grown_holders(before: Census, after: Census, steps: int, *, least_rate: float) -> list[Leak]:
    """Return the names whose objects grew between two censuses, largest first; a graph of autograd always counts."""
    grown: dict[str, dict[str, tuple[float, float, Sequence[Any]]]] = {}
    # Growth inside growing elements joins that of the elements, under their container's name.
    for (name, kind), now in sorted(after.items(), key=lambda item: len(item[0][0])):
        was = before.get((name, kind), Holding())
        count, size = (now.count - was.count) / steps, (now.bytes - was.bytes) / steps
        if (name, kind) not in before and "[*]" not in name and now.count < _EACH_STEP * steps:
            continue  # a local that the first census did not meet
        if count >= _EACH_STEP or size >= least_rate:
            inside = (one for one in grown if name == one or name.startswith((f"{one}[", f"{one}.")))
            holder = next(inside, name.removesuffix(" (key)").removesuffix("[*]"))
            types = grown.setdefault(holder, {})
            old_count, old_size, samples = types.get(kind, (0.0, 0.0, ()))
            types[kind] = (old_count + count, old_size + size, (*samples, *now.samples))
    leaks = [
        Leak(
            kind="objects",
            holder=holder,
            bytes_per_step=sum(size for _, size, _ in types.values()),
            per_step={kind: count for kind, (count, _, _) in types.items() if count > 0},
            samples=[one for _, _, samples in types.values() for one in reversed(samples)],
        )
        for holder, types in grown.items()
    ]
    leaks = [one for one in leaks if one.bytes_per_step >= least_rate or GRAPH in one.per_step]
    return sorted(leaks, key=lambda one: -one.bytes_per_step)


def unexplained(
    before: MemorySample, after: MemorySample, named: Sequence[Leak], *, workers: Mapping[int, str]
) -> list[Leak]:
    """Return the growth between two samples, taken after collections of garbage, that no named objects explain."""
    steps = after.step - before.step
    found = [
        Leak(
            kind="worker",
            holder=f"process {pid} ({workers.get(pid, 'a child process')})",
            bytes_per_step=(size - before.children[pid]) / steps,
        )
        for pid, size in after.children.items()
        if pid in before.children and size - before.children[pid] >= _LEAST_CHILD_TOTAL
    ]
    explained = sum(one.bytes_per_step for one in named)
    rest = (after.pinned - before.pinned) / steps - explained
    if rest > explained:  # torch rounds each block up to a power of two
        found.append(Leak(kind="pinned", holder="page-locked host memory (pin_memory)", bytes_per_step=rest))
    if before.heap_used is not None and after.heap_used is not None:
        rest = (after.heap_used - before.heap_used) / steps - explained
        if rest * steps >= _LEAST_NATIVE_TOTAL and rest > explained / 2:
            pinned = "does not grow" if after.pinned <= before.pinned else "grows"
            blocks = (after.python_blocks - before.python_blocks) / steps
            holder = (
                "memory of the C heap that no Python object holds (a cache or a missing free in an extension; "
                f"pinned memory {pinned}, Python's own blocks {blocks:+.1f} a step)"
            )
            found.append(Leak(kind="native", holder=holder, bytes_per_step=rest))
    rest = (after.device_allocated - before.device_allocated) / steps - explained
    if rest * steps >= _LEAST_NATIVE_TOTAL and rest > explained / 2:
        found.append(Leak(kind="device", holder="the accelerator's allocator", bytes_per_step=rest))
    return found


def with_graphs(named: Sequence[Leak], others: Sequence[Leak]) -> tuple[list[Leak], list[Leak]]:
    """Attribute unexplained memory to growing autograd graphs: their saved tensors are no Python objects."""
    holders = [one for one in named if GRAPH in one.per_step]
    native = [one for one in others if one.kind in ("native", "device")]
    if not holders or not native:
        return list(named), list(others)
    nodes = sum(one.per_step[GRAPH] for one in holders)
    rest = sum(one.bytes_per_step for one in native)
    shared = [
        replace(one, bytes_per_step=one.bytes_per_step + rest * one.per_step.get(GRAPH, 0.0) / nodes)
        for one in named
    ]
    return shared, [one for one in others if one not in native]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """The result of an investigation of growing memory.

    Attributes:
        first_step: The step at which the investigation began; it ended at `last_step`.
        leaks: The memory that grows, the largest first; empty if none does.
        is_fragmented: Whether the allocator of the host or the device takes more memory while the memory in use does
            not grow.
        growth: The growth of each measurement before the investigation, by name.
    """

    first_step: int
    last_step: int
    leaks: Sequence[Leak]
    cycles: Sequence[TensorCycle] = ()
    is_fragmented: bool = False
    growth: dict[str, Growth]

    def __str__(self) -> str:
        where = f"steps {self.first_step} to {self.last_step}"
        lines = [f"memory grows ({where}):" if self.leaks else f"no memory leaks ({where})"]
        lines += [f"  {one}" for one in self.leaks]
        lines += [f"  {one}" for one in self.cycles]
        if self.is_fragmented:
            lines.append(
                "  the allocator takes more memory while what is in use does not grow: fragmentation"
            )
        return "\n".join(lines)
