"""Dataclasses of Accelerate's options; each field declares its translation: a setting, an error, or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, dataclass_transform

from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_messages import suggest

Options = TypeVar("Options")
BECOMES, REFUSED, WITHOUT_EFFECT = "becomes", "refused", "without_effect"


class TranslationError(ValueError):
    """A value of Accelerate's options that drivetrain cannot honour."""


def becomes(setting: str, **default: Any) -> Any:
    """Declare a field that is translated into a setting of drivetrain's; some values may be refused."""
    return field(metadata={BECOMES: setting}, **default)


def refused(part: str, instead: str, **default: Any) -> Any:
    """Declare a field whose only allowed value is the default; errors name the part and the way out, `instead`."""
    return field(metadata={REFUSED: (part, instead)}, **default)


def without_effect(reason: str, **default: Any) -> Any:
    """Declare a field that changes nothing in drivetrain, with the reason."""
    return field(metadata={WITHOUT_EFFECT: reason}, **default)


@dataclass_transform(field_specifiers=(field, becomes, refused, without_effect))
def options(kind: type[Options]) -> type[Options]:
    """Decorate a class: make it a dataclass whose arguments are checked as in `with_known_fields`."""
    return with_known_fields(dataclass(kind))


def with_known_fields(kind: type[Options]) -> type[Options]:
    """Decorate a class: its constructor refuses an unknown argument by a TypeError that lists the known ones."""
    construct = kind.__init__
    _, *known = signature(construct).parameters
    what = "field" if is_dataclass(kind) else "argument"

    @wraps(construct)
    def init(self: Options, *args: Any, **kwargs: Any) -> None:
        if unknown := next((name for name in kwargs if name not in known), None):
            raise TypeError(
                f"{kind.__name__}() got an unexpected keyword argument {unknown!r}: Accelerate "
                f"{PROVIDED_VERSIONS[-1]}, whose interface is provided, has no such {what}"
                f"{suggest(unknown, known)}. The {what}s are {', '.join(known)}"
            )
        construct(self, *args, **kwargs)

    kind.__init__ = init
    return kind


def settings_of(given: Any) -> dict[str, Any]:
    """Return the settings whose value is a field's own: the fields declared with a plain `section.setting`."""
    found = {each.metadata.get(BECOMES, "").partition(".")[2]: each.name for each in fields(given)}
    return {setting: getattr(given, name) for setting, name in found.items() if setting.isidentifier()}


def refusal(given: Any, name: str, value: object, instead: str = "", *, ours: str = "") -> TranslationError:
    """Return the error for a refused value of a field; by default, with the texts of the field's declaration."""
    said: Mapping[str, Any] = {each.name: each.metadata for each in fields(given)}[name]
    part, way_out = said.get(REFUSED, (said.get(BECOMES, ""), ""))
    return TranslationError(
        f"{type(given).__name__}({name}={value!r}) (drivetrain: {ours or part}): {instead or way_out}"
    )


def check_refused(given: Any) -> None:
    """Raise a TranslationError if a `refused` field has another value than its default (False counts as None)."""
    for each in fields(given):
        value = getattr(given, each.name)
        is_default = value == each.default or (each.default is None and value is False)
        if REFUSED in each.metadata and not is_default:
            raise refusal(given, each.name, value)
