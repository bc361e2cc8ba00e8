"""Read and patch environment variables, as scripts and tests for Accelerate do."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from inspect import isclass
from logging import getLogger
from typing import Any, TypeVar, cast

from drivetrain_config import environ

logger = getLogger(__name__)

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_UNSAFE = (";", "\n", "<", ">", " ")  # a launcher on the other host would read them as syntax
_PREFIX = "ACCELERATE_"

Value = TypeVar("Value", bound=str | bool | int | float)


def truth(value: object, *, of: str) -> bool:
    """Return the truth value of a bool, number or word in any case; the error names the value by `of`."""
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(
            f"{of}={value!r}: invalid truth value; say one of {', '.join(_TRUE)} or {', '.join(_FALSE)}"
        )
    return word in _TRUE


def says_yes(variable: str) -> bool:
    """Return whether an environment variable means yes; an unknown word means no."""
    return (environ.read(variable) or "").lower() in _TRUE


def value_from(name: str, default: Value) -> Value:
    """Return a variable's value, converted to the default's type; the default if the variable is not set."""
    text = environ.read(name)
    if text is None:
        return default
    kind: Any = type(default)
    if kind is bool:
        return cast("Any", truth(text, of=name))
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: must be of type {kind.__name__}") from None


def fill_unsaid(options: object, prefix: str, **defaults: str | bool | int | float) -> None:
    """Set each field that is None to the value of the variable PREFIX + NAME, or else to the field's default."""
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value_from(f"{prefix}{name.upper()}", default))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return whether a word means yes, as 1 or 0, or as a bool with `to_bool`."""
    found = truth(value, of="value")
    return found if to_bool else int(found)


def is_same_word(one: str, other: str) -> bool:
    """Return whether two words are equal in any case, or both mean yes, or both mean no."""
    words = {one.lower(), other.lower()}
    return len(words) == 1 or words <= {*_TRUE} or words <= {*_FALSE}


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the value of the first variable that holds an integer of 0 or more, or else the default."""
    for key in env_keys:
        text = environ.read(key)
        if text is not None and (number := int(text)) >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable's word means yes."""
    return value_from(key, default)


def parse_choice_from_env(key: str, default: Any = "no") -> str:
    """Return a variable's text."""
    return value_from(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return variables as lines `NAME=value`, without variables that hold characters special to a shell."""
    lines: list[str] = []
    for name, value in current_env.items():
        if name and value and not any(character in name + value for character in _UNSAFE):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning(
                "the variable %s=%s is left out: it is empty, or has a space or one of ; < >", name, value
            )
    return lines


@contextmanager
def clear_environment() -> Generator[None]:
    """Run the block without any environment variable, and restore all variables afterwards."""
    before = environ.child_environment()
    environ.replace({})
    try:
        yield
    finally:
        environ.replace(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Generator[None]:
    """Run the block with variables set, their names in upper case, and restore them afterwards."""
    with environ.exported(**{name.upper(): str(value) for name, value in kwargs.items()}):
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function or a test class so that the variables ACCELERATE_* are restored after each call."""
    if not isclass(func_or_cls):
        return _purging()(func_or_cls)
    for name in dir(func_or_cls):
        member: object = getattr(func_or_cls, name)
        if name.startswith("test") and callable(member):
            setattr(func_or_cls, name, _purging()(member))
    return func_or_cls


@contextmanager
def _purging() -> Generator[None]:
    before = environ.child_environment()
    try:
        yield
    finally:
        after = environ.child_environment()
        kept = {name: text for name, text in after.items() if not name.startswith(_PREFIX)}
        restored = {name: text for name, text in before.items() if name.startswith(_PREFIX)}
        environ.replace({**kept, **restored})
