"""Words of the environment that fill the fields of plugins which a program leaves out."""

from drivetrain_config import environ

_YES = ("1", "true", "yes", "y", "t", "on")
_NO = ("0", "false", "no", "n", "f", "off")


def truth(value: object, *, of: str) -> bool:
    """Return the truth value that a word means.

    Args:
        value: A bool, a number, or a word in any case.
        of: The name of the field or variable, for the message.

    Raises:
        ValueError: The word means neither.
    """
    word = str(value).lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise ValueError(f"{of}={value!r}: invalid truth value; say one of {', '.join((*_YES, *_NO))}")


def word_from(name: str, default: str) -> str:
    """Return a variable's text, or the default."""
    text = environ.read(name)
    return default if text is None else text


def truth_from(name: str, *, default: bool = False) -> bool:
    """Return the truth value of a variable, or the default."""
    text = environ.read(name)
    return default if text is None else truth(text, of=name)


def integer_from(name: str, default: int) -> int:
    """Return the integer of a variable, or the default.

    Raises:
        ValueError: The text is no integer.
    """
    text = environ.read(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: must be an integer") from None


def number_from(name: str, default: float) -> float:
    """Return the number of a variable, or the default.

    Raises:
        ValueError: The text is no number.
    """
    text = environ.read(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: must be a number") from None
