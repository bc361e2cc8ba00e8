"""Change layers of a model: all of the given layers, or none."""

from collections.abc import Callable, Iterable

from torch import nn

from drivetrain_precision.errors import PrecisionError

Change = Callable[[nn.Module], nn.Module]


def change_layers(model: nn.Module, names: Iterable[str], change: Change, undo: Change) -> None:
    """Change layers of a model, and put each result into every place of the model that holds the layer.

    If a change fails or the user interrupts, `undo` restores the changed layers, and the model is unchanged.
    PrecisionError if the model itself is a layer that would be replaced.
    """
    changed: list[tuple[nn.Module, nn.Module]] = []
    try:
        for name in names:
            old = model.get_submodule(name)
            new = change(old)
            changed.append((old, new))
            _put(model, old, new)
    except BaseException:
        for old, new in reversed(changed):
            if new is old:
                undo(new)
            elif old is not model:
                _put(model, new, old)
        raise


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    if new is old:
        return
    if old is model:
        raise PrecisionError(
            f"the model is a single {type(old).__name__}, which this recipe exchanges for another module: put it "
            "into an nn.Sequential"
        )
    for name in [name for name, each in model.named_modules(remove_duplicate=False) if each is old]:
        model.set_submodule(name, new)
