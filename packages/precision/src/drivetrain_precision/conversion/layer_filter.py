"""Choose the linear layers to convert: by name, by type, by size, by place, or by a function."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from drivetrain_precision.errors import PrecisionError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFilter:
    """The layers to convert, among those that a recipe accepts; all conditions must hold.

    Attributes:
        include: Patterns of the layers' names, as `fnmatch` reads them; one must match.
        exclude: Patterns of names, of which none may match, such as `"*.router"`.
        inside: Types of modules; a layer must be one of them or lie in one. Empty: anywhere.
        min_features: The least of a layer's `in_features` and `out_features`; small products gain nothing.
        skip_first: Whether to keep the model's first linear layer as it is, which sees the input's full range.
        skip_last: Whether to keep its last one, which in language models computes the logits.
        accept: A function of name and layer that returns whether to convert it.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    inside: tuple[type[nn.Module], ...] = ()
    min_features: int = 0
    skip_first: bool = True
    skip_last: bool = True
    accept: Callable[[str, nn.Module], bool] | None = None

    def check(self, names: Collection[str]) -> None:
        """Check that each pattern matches a layer.

        Args:
            names: The names of the linear layers of all models that the patterns are for.

        Raises:
            PrecisionError: A pattern matches none; the message gives the nearest names.
        """
        for field in ("include", "exclude"):
            for pattern in getattr(self, field):
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    near = get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
                    raise PrecisionError(
                        f"LayerFilter({field}={pattern!r}) matches none of the {len(names)} linear layers; patterns "
                        f"are matched against whole names, such as {', '.join(map(repr, near)) or 'none here'}"
                    )

    def refusal(self, name: str, module: nn.Module, *, is_inside: bool) -> str | None:
        """Return why a layer is left out, or None.

        Args:
            name: The name of the layer in its model.
            module: The linear layer itself.
            is_inside: Whether it is one of the types of `inside`, or lies in one.
        """
        if not any(fnmatchcase(name, pattern) for pattern in self.include):
            return f"no pattern of include={self.include!r} matches"
        for pattern in self.exclude:
            if fnmatchcase(name, pattern):
                return f"exclude={pattern!r} matches"
        if self.inside and not is_inside:
            return f"is in none of inside={tuple(kind.__name__ for kind in self.inside)!r}"
        features = min(getattr(module, "in_features", 0), getattr(module, "out_features", 0))
        if features < self.min_features:
            return f"has {features} features, less than min_features={self.min_features}"
        if self.accept is not None and not self.accept(name, module):
            return "accept returned False"
        return None
