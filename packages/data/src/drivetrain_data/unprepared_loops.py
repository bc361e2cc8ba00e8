"""Find the user's loop around a call in the source code: the loop's line and its loader.

Python does not expose the iterable of a running `for`. This module therefore parses the loops around each caller's
line and evaluates the names they iterate over. It concludes nothing if the source is missing or no name is a loader.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED, currentframe, getattr_static
from types import FrameType
from typing import Any, TypeAlias, cast

from torch.utils.data import DataLoader

from drivetrain_data._nested import Nested
from drivetrain_data.errors import UnpreparedLoaderError
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.remainder import holds_rows
from drivetrain_data.sharded_loader import divides_itself
from drivetrain_data.skipping_view import SkippedBatches

_NUM_CALLERS = 10  # loops further out are not searched
_PASS_THROUGH = ("enumerate", "iter", "islice", "zip", "tqdm", "track")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Block: TypeAlias = ast.For | ast.AsyncFor | ast.comprehension | ast.With


class UnpreparedLoops:
    """A finder of loops over loaders that every rank reads in full, with a cache of parsed files."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], list[_Block]] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def check(self, data: Nested) -> None:
        """Refuse rows gathered in a loop over an unsharded loader, because each sample would count once per rank.

        A loop inside `join_uneven_inputs` is accepted, and so is a loop over an unknown loader. UnpreparedLoaderError
        if the innermost loop around the current call reads all data on every rank.
        """
        if holds_rows(data) and (loop := self.innermost()) is not None:
            raise UnpreparedLoaderError(
                f"gather_for_metrics in the loop over {loop}, which is a DataLoader that was not "
                "prepared: every rank reads all of it, and each sample would be gathered once per rank. Pass it to "
                "prepare() and loop over the result. If each rank's loader holds its own part of the data, gather() "
                "joins their rows as they are (drivetrain_state.gather_object for objects other than tensors)"
            )

    def innermost(self) -> str | None:
        """Return the head and the place of the innermost loop; None if its loader is prepared, divided or unknown."""
        frame = currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith("drivetrain"):
            frame = frame.f_back
        found: str | None = None
        for _ in range(_NUM_CALLERS):
            if frame is None:
                break
            blocks = self._find_enclosing_blocks(frame.f_code.co_filename, frame.f_lineno)
            entered = [
                item.context_expr for block in blocks if isinstance(block, ast.With) for item in block.items
            ]
            if any(
                getattr(getattr(call, "func", None), "attr", "") == "join_uneven_inputs" for call in entered
            ):
                return None
            for block in blocks if found is None else []:
                loaders = [] if isinstance(block, ast.With) else list(_loaders_of(block.iter, frame))
                if any(isinstance(each, ShardedLoader | SkippedBatches) for each in loaders):
                    return None
                if any(not isinstance(each, type) and divides_itself(each) for each in loaders):
                    return None
                if loaders and not isinstance(block, ast.With):
                    found = f"`{ast.unparse(block.iter)}` ({frame.f_code.co_filename}:{block.iter.lineno})"
                    break
            frame = frame.f_back
        return found

    def _find_enclosing_blocks(self, filename: str, line: int) -> list[_Block]:
        """Return the loops and `with` blocks around a line within its function, innermost first."""
        key = (filename, line)
        if key not in self._blocks:
            if filename not in self._trees:
                try:
                    self._trees[filename] = ast.parse("".join(linecache.getlines(filename)))
                except (SyntaxError, ValueError):
                    self._trees[filename] = None
            tree = self._trees[filename]
            self._blocks[key] = [] if tree is None else _blocks_around(tree, line)[::-1]
        return self._blocks[key]


def _blocks_around(tree: ast.Module, line: int) -> list[_Block]:
    """Return the blocks around a line within its innermost function, outermost first."""
    scope: ast.AST = tree
    for node in ast.walk(tree):  # breadth-first: the last match is the innermost
        if isinstance(node, _FUNCTIONS) and _holds(node, line):
            scope = node
    found: list[_Block] = []
    level: list[ast.AST] = [scope]
    while level:
        for node in level:
            if isinstance(node, (ast.For, ast.AsyncFor, ast.With)):
                found += [node] if any(_holds(each, line) for each in node.body) else []
            elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                found += node.generators if _holds(node, line) else []
        inside = (child for node in level for child in ast.iter_child_nodes(node))
        level = [child for child in inside if not isinstance(child, _FUNCTIONS)]
    return found


def _holds(node: Any, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _loaders_of(head: ast.expr, frame: FrameType) -> Iterator[Any]:
    """Yield the loaders that a loop iterates over, or the class of a loader constructed in the loop's head."""
    if isinstance(head, ast.Call):
        called = head.func.attr if isinstance(head.func, ast.Attribute) else getattr(head.func, "id", "")
        if called in _PASS_THROUGH:
            for argument in head.args:
                yield from _loaders_of(argument, frame)
            return
        made = _value(head.func, frame)
        kept = not any(each.arg in (None, "sampler", "batch_sampler") for each in head.keywords)
        if isinstance(made, type) and issubclass(made, DataLoader) and kept:
            yield made
        return
    value = _value(head, frame)
    if isinstance(value, (DataLoader, ShardedLoader, SkippedBatches)):
        yield value


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, an attribute or an item without running user code; None if unknown."""
    if isinstance(node, ast.Name):
        names = frame.f_locals
        value = names.get(node.id, frame.f_globals.get(node.id))
        if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
            names.clear()  # until 3.13 a snapshot, which the frame keeps: it would hold the loop's batch and loss
        return value
    if isinstance(node, ast.Attribute):
        return getattr_static(_value(node.value, frame), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder, key = _value(node.value, frame), node.slice.value
        if type(holder) is dict:
            return cast("dict[Any, Any]", holder).get(key)
        if type(holder) in (list, tuple) and isinstance(key, int) and key < len(holder):
            return holder[key]
    return None
