"""Choose the linear layers to convert, by name, type, size, place or a function."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from drivetrain_precision.errors import PrecisionError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFilter:
    """The layers to convert, among those that a recipe accepts; all conditions must hold.

    Attributes:
        include: Patterns of the layers' names, as `fnmatch` reads them; one must match.
        exclude: Patterns of names, such as `"*.router"`; none may match.
        inside: Types of modules; a layer must lie in a module of such a type or be one. If empty, any place counts.
        min_features: The minimum of a layer's `in_features` and `out_features`; small products gain nothing.
        skip_first: Whether to leave out the model's first linear layer, which sees the input's full range.
        skip_last: Whether to leave out the last linear layer, which in language models computes the logits.
        accept: A function of a layer's name and the layer that returns whether to convert the layer.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    inside: tuple[type[nn.Module], ...] = ()
    min_features: int = 0
    skip_first: bool = True
    skip_last: bool = True
    accept: Callable[[str, nn.Module], bool] | None = None

    def __post_init__(self) -> None:
        """Raise PrecisionError for a value of a wrong type or a negative number."""
        for field in ("include", "exclude"):
            patterns: object = getattr(self, field)
            if not _is_tuple_of(patterns, lambda each: isinstance(each, str)):
                raise PrecisionError(
                    f"{field}={patterns!r}: must be a tuple of patterns, such as ('*.router',)"
                )
        if not _is_tuple_of(self.inside, lambda each: isinstance(each, type) and issubclass(each, nn.Module)):
            raise PrecisionError(
                f"inside={self.inside!r}: must be a tuple of classes of modules, such as (LlamaMLP,)"
            )
        if type(self.min_features) is not int or self.min_features < 0:
            raise PrecisionError(f"min_features={self.min_features!r}: must be an integer from 0 on")
        for field in ("skip_first", "skip_last"):
            if type(getattr(self, field)) is not bool:
                raise PrecisionError(f"{field}={getattr(self, field)!r}: must be True or False")
        if self.accept is not None and not callable(self.accept):
            raise PrecisionError(f"accept={self.accept!r}: must be a function of name and layer, or None")

    def check(self, names: Collection[str]) -> None:
        """Raise PrecisionError, with the nearest names, if a pattern matches none of the linear layers in `names`."""
        for field in ("include", "exclude"):
            for pattern in getattr(self, field):
                check_pattern(pattern, names, said=f"LayerFilter({field}={pattern!r})")

    def refusal(self, name: str, module: nn.Module, *, is_inside: bool) -> str | None:
        """Return why the filter leaves a layer out, or None; `is_inside` says if it lies in a type of `inside`."""
        if not any(fnmatchcase(name, pattern) for pattern in self.include):
            return f"no pattern of include={self.include!r} matches"
        for pattern in self.exclude:
            if fnmatchcase(name, pattern):
                return f"exclude={pattern!r} matches"
        if self.inside and not is_inside:
            return f"is in none of inside={tuple(kind.__name__ for kind in self.inside)!r}"
        if isinstance(module, nn.Linear):  # a norm, which a recipe may convert too, multiplies no matrices
            features = min(module.in_features, module.out_features)
            if features < self.min_features:
                return f"has {features} features, less than min_features={self.min_features}"
        if self.accept is not None and not self.accept(name, module):
            return "accept returned False"
        return None


def check_layers(layers: object) -> None:
    """Raise PrecisionError if a recipe's filter is not a LayerFilter."""
    if not isinstance(layers, LayerFilter):
        hint = ", as in LayerFilter(accept=...)" if callable(layers) else ""
        raise PrecisionError(f"layers={layers!r}: must be a LayerFilter{hint}")


def check_pattern(pattern: str, names: Collection[str], *, said: str) -> None:
    """Raise PrecisionError, with near names, if a pattern, which the user wrote as `said`, matches no layer."""
    if pattern == "*" or any(fnmatchcase(name, pattern) for name in names):
        return
    wider = (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*", f"*{pattern}*")
    meant = next((each for each in wider if any(fnmatchcase(name, each) for name in names)), None)
    near = get_close_matches(pattern, dict.fromkeys(names), n=3, cutoff=0.3) or list(names)[:3]
    hint = f"; {meant!r} matches {sum(fnmatchcase(name, meant) for name in names)} of them" if meant else ""
    raise PrecisionError(
        f"{said} matches none of the {len(names)} linear layers; patterns are matched against whole names, such as "
        f"{', '.join(map(repr, near)) or 'none here'}{hint}"
    )


def _is_tuple_of(given: object, accepts: Callable[[object], bool]) -> bool:
    return isinstance(given, tuple | list) and all(map(accepts, cast("tuple[object, ...]", given)))
