"""Draw which rank reads which sample in which step under each strategy, as the loaders really deal them out.

    uv run python tools/draw_strategies.py

It writes docs/images/strategies.svg; a test holds the file against what this draws.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_data import Shard, shard_loader

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "strategies.svg"
NUM_SAMPLES, NUM_RANKS, NUM_NODES, BATCH_SIZE = 24, 4, 2, 2
_COLOURS = ("#4c78a8", "#9ecae9", "#f58518", "#ffbf79")  # two shades of blue, one node; of orange, the other
_READ = "#d0d0d0"
_CELL, _LEFT, _ROW = 26, 196, 44


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Who reads a sample, and when; rank -1: it was read before the resume."""

    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy, and what becomes of each sample of the dataset."""

    title: str
    cells: tuple[Cell, ...]


def striped(position: int, shard: Shard) -> int:
    """A user's rule: each rank takes every fourth sample."""
    return position * shard.count + shard.index


def rows() -> Iterator[Row]:
    """The rows of the picture."""
    yield Row(title="interleaved", cells=_read(NUM_RANKS))
    yield Row(title="interleaved, shuffled", cells=_read(NUM_RANKS, shuffle=True))
    yield Row(title="block", cells=_read(NUM_RANKS, strategy="block"))
    yield Row(title="block, shuffled", cells=_read(NUM_RANKS, strategy="block", shuffle=True))
    yield Row(title="node", cells=_read(NUM_RANKS, strategy="node"))
    yield Row(title="a function: every fourth", cells=_read(NUM_RANKS, strategy=striped))
    yield Row(title="block, step 0 on 4 ranks,\nthe rest on 3", cells=_resumed(3, strategy="block"))


def draw() -> str:
    """The picture, as SVG."""
    drawn = list(rows())
    width, height = _LEFT + NUM_SAMPLES * _CELL + 8, len(drawn) * _ROW + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    parts += [
        _text(_LEFT + (index + 0.5) * _CELL, 22, str(index), anchor="middle", fill="#808080")
        for index in range(NUM_SAMPLES)
    ]
    parts.append(_text(8, 22, "sample of the dataset", fill="#808080"))
    for number, row in enumerate(drawn):
        top = 34 + number * _ROW
        for line, text in enumerate(row.title.split("\n")):
            parts.append(_text(8, top + 18 + 14 * line - 6 * row.title.count("\n"), text))
        for index, cell in enumerate(row.cells):
            left = _LEFT + index * _CELL
            colour = _READ if cell.rank < 0 else _COLOURS[cell.rank]
            parts.append(
                f'<rect x="{left}" y="{top}" width="{_CELL - 2}" height="{_CELL}" rx="3" fill="{colour}"/>'
            )
            parts.append(_text(left + _CELL / 2 - 1, top + 17, str(cell.step), anchor="middle"))
    top = height - 26
    meanings = [f"rank {rank}, node {rank * NUM_NODES // NUM_RANKS}" for rank in range(NUM_RANKS)]
    for number, (colour, meaning) in enumerate(
        zip((*_COLOURS, _READ), (*meanings, "read before"), strict=True)
    ):
        left = _LEFT + number * 116
        parts.append(f'<rect x="{left}" y="{top}" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(_text(left + 20, top + 12, meaning))
    parts.append(_text(8, top + 12, "the number is the step"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def _read(num_ranks: int, *, shuffle: bool = False, strategy: Any = "interleaved") -> tuple[Cell, ...]:
    cells: dict[int, Cell] = {}
    for rank in range(num_ranks):
        for step, (batch,) in enumerate(_loader(rank, num_ranks, shuffle=shuffle, strategy=strategy)):
            cells |= {index: Cell(rank=rank, step=step) for index in batch.tolist()}
    return tuple(cells[index] for index in range(NUM_SAMPLES))


def _resumed(num_ranks: int, *, strategy: Any) -> tuple[Cell, ...]:
    """Step 0 on all ranks, the steps after it on `num_ranks`; a sample that is only repeated is not drawn."""
    cells: dict[int, Cell] = {}
    state: dict[str, Any] = {}
    for rank in range(NUM_RANKS):
        loader = _loader(rank, NUM_RANKS, strategy=strategy)
        (batch,) = next(iter(loader))
        cells |= {index: Cell(rank=-1, step=0) for index in batch.tolist()}
        state = loader.state_dict()
    for rank in range(num_ranks):
        loader = _loader(rank, num_ranks, strategy=strategy)
        loader.load_state_dict(state)
        for step, (batch,) in enumerate(loader, start=1):
            assert loader.current is not None
            for index in batch[loader.current.kept(rank)].tolist():
                cells[index] = Cell(rank=rank, step=step)
    return tuple(cells[index] for index in range(NUM_SAMPLES))


def _loader(rank: int, num_ranks: int, *, shuffle: bool = False, strategy: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), batch_size=BATCH_SIZE, shuffle=shuffle)
    nodes = NUM_NODES if num_ranks % NUM_NODES == 0 else 1
    return shard_loader(loader, Shard(rank, num_ranks), strategy=strategy, num_nodes=nodes, seed=1)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}\n")
