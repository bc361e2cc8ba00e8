"""Reference cycles that hold tensors: garbage that stays in memory until the garbage collector runs."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain_memory.leaks.roots import line_that_made
from drivetrain_memory.storages import storage_of
from drivetrain_messages import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCycle:
    """Objects that refer to each other in a circle and hold tensors.

    Attributes:
        types: The types of the objects, in the order of the references; the last repeats the first.
        tensor_bytes: The bytes of the tensors that the circles held.
        line: The user's line that made one of the objects; None if allocations were not traced.
    """

    types: tuple[str, ...]
    count: int
    tensor_bytes: int
    line: str | None = None

    def __str__(self) -> str:
        made = f", made at {self.line}" if self.line else ""
        return (
            f"{self.count} reference cycles {' -> '.join(self.types)} held {format_size(self.tensor_bytes)} of "
            f"tensors until the garbage collector came{made}"
        )


def collect_cycles() -> tuple[TensorCycle, ...]:
    """Collect garbage, and return the garbage cycles that held tensors."""
    before, flags = len(gc.garbage), gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        garbage = gc.garbage[before:]
        del gc.garbage[before:]
    finally:
        gc.set_debug(flags)
    found = _describe(garbage)
    garbage.clear()
    gc.collect()
    return found


def _describe(garbage: Sequence[Any]) -> tuple[TensorCycle, ...]:
    own = {id(one): one for one in garbage}
    edges = {key: [id(held) for held in gc.get_referents(one) if id(held) in own] for key, one in own.items()}
    grouped: dict[tuple[str, ...], list[Any]] = {}
    for circle in circles(edges):
        tensors = [own[key] for key in _find_reachable(circle, edges) if isinstance(own[key], Tensor)]
        if tensors:
            names = tuple(type(own[key]).__name__ for key in circle)
            # Turned so that equal circles read the same, from wherever they were entered.
            turned = min(names[i:] + names[:i] for i in range(len(names)))
            entry = grouped.setdefault(turned, [0, 0, None])
            entry[0] += 1
            entry[1] += sum(storage.size_bytes for one in tensors if (storage := storage_of(one)))
            entry[2] = entry[2] or next(filter(None, (line_that_made(own[key]) for key in circle)), None)
    return tuple(
        TensorCycle(types=(*names, names[0]), count=count, tensor_bytes=size, line=line)
        for names, (count, size, line) in grouped.items()
    )


def circles(edges: dict[int, list[int]]) -> list[list[int]]:
    """Return one circle, a list of nodes in order, for each group of nodes that reach each other."""
    found: list[list[int]] = []
    done: set[int] = set()
    for start in edges:
        path: list[int] = []
        place: dict[int, int] = {}
        stack: list[tuple[int, int]] = [(start, 0)]
        while stack:
            node, depth = stack.pop()
            for left in path[depth:]:
                del place[left]
                done.add(left)
            del path[depth:]
            if node in place:
                found.append(path[place[node] :])
                done.update(path)
            if node in place or node in done:
                continue
            place[node] = len(path)
            path.append(node)
            stack += [(after, len(path)) for after in edges[node]]
        done.update(path)
    return found


def _find_reachable(start: Sequence[int], edges: dict[int, list[int]]) -> set[int]:
    seen, pending = set(start), list(start)
    while pending:
        for after in edges[pending.pop()]:
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return seen
