"""The blocks of a model, of which it repeats a few makes; and the model with fewer of them."""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torch import nn


def find_stacks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the lists of several blocks with parameters, those around others first and without what is inside.

    By the name of a list, it is the make of each of its blocks, numbered in the order of first appearance: blocks of
    one make have a class and parameters alike.

    Example:
        >>> from torch import nn
        >>> find_stacks(nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(3))))
        {'0': (0, 0, 0)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{around}.") for around in found)
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or is_inside:
            continue
        makes: dict[object, int] = {}
        numbers = tuple(makes.setdefault(_make_of(block), len(makes)) for block in module)
        if len(makes) < len(numbers) and all(any(True for _ in block.parameters()) for block in module):
            found[name] = numbers
    return found


@contextmanager
def shortened(model: nn.Module, kept: Mapping[tuple[str, int], int]) -> Generator[None]:
    """Keep of each make of blocks the first `kept` in the block; `kept` has the list's name and the make's number."""
    stacks = find_stacks(model)
    lists = {name: model.get_submodule(name) for name in stacks}
    try:
        for name, makes in stacks.items():
            counts: Counter[int] = Counter()
            few: list[nn.Module] = []
            for make, block in zip(makes, lists[name].children(), strict=True):
                counts[make] += 1
                if counts[make] <= kept[name, make]:
                    few.append(block)
            _put(model, name, nn.ModuleList(few))
        yield
    finally:
        for name, whole in lists.items():
            _put(model, name, whole)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    around, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(around), attribute, module)


def num_blocks(model: nn.Module) -> dict[tuple[str, int], int]:
    """Return the number of blocks of each make, by the name of their list and the number of the make."""
    return {
        (name, make): count
        for name, makes in find_stacks(model).items()
        for make, count in sorted(Counter(makes).items())
    }


def _make_of(block: nn.Module) -> object:
    held = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block), held, tuple(type(module) for module in block.modules())
