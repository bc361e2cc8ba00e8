"""The check of the arguments of gradient clipping."""

import math
from numbers import Real


def check_clip(norm: object, norm_type: object, value: object) -> None:
    """Refuse invalid arguments of a clip; an infinite norm is valid and only measures."""
    if (norm is None) == (value is None):
        raise ValueError(f"clip(norm={norm!r}, value={value!r}): give one of the two")
    for name, number in (("norm", norm), ("norm_type", norm_type), ("value", value)):
        if number is None or (type(number) is float and number > 0):  # the common case, at every step
            continue
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"clip({name}={number!r}): it is a number above 0, not {type(number).__name__}")
        if math.isnan(number) or number <= 0:
            raise ValueError(
                f"clip({name}={number!r}): it must be above 0; an infinite norm measures and clips nothing"
            )
