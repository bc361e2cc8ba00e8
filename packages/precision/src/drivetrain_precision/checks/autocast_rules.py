"""The rules of torch's autocast for each operation on a kind of device, found by calling torch.

torch has no readable table of rules. Its registrations name the operations, and calls on tensors without values show
the casts: a cast comes first in a call, and the call then ends. The device need not be present.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from drivetrain_precision.compat import CastSeenError, arguments_of, autocast_names, valueless_tensor

Rule = Literal["fp32", "half", "widest", "refused"]


def autocast_rules(device_type: str) -> dict[str, Rule]:
    """Return the rule of torch's autocast for each operation; absent operations keep their inputs' dtype.

    Args:
        device_type: A kind of device, such as "cuda" or "cpu". The device need not be present.

    Returns:
        For each operation's name, such as "softmax": "fp32" (computed in fp32), "half" (in autocast's dtype),
        "widest" (in the widest dtype of its inputs) or "refused" (an error under autocast).

    Raises:
        ValueError: torch has no autocast for the kind of device.
    """
    try:
        names = autocast_names(device_type) if torch.amp.is_autocast_available(device_type) else []
    except RuntimeError:  # a word that is no device's
        names = []
    if not names:
        raise ValueError(
            f"device_type={device_type!r}: torch has no rules of autocast for it; pass 'cuda', 'cpu', 'xpu', "
            "'mps', or the kind of a device whose package is imported"
        )
    rules: dict[str, Rule] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that torch has deprecated
        for name in names:
            space, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            operation = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
            rules.setdefault(base.removeprefix("_"), _find_rule(operation, device_type))
    return rules


def fp32_operations(device_type: str) -> tuple[str, ...]:
    """Return the sorted names of the operations that torch's autocast keeps in fp32 on a kind of device.

    The device need not be present. The lists differ: softmax and layer_norm are in the list of "cuda", not of "cpu".

    Raises:
        ValueError: torch has no autocast for the kind of device.
    """
    return tuple(sorted(name for name, rule in autocast_rules(device_type).items() if rule == "fp32"))


def _find_rule(operation: Any, device_type: str) -> Rule:
    narrow, refused = _find_dtypes(operation, torch.float16, device_type)
    if narrow & {torch.float32, torch.complex64}:  # complex where fp32 is transformed
        return "fp32"
    if refused:
        return "refused"
    wide, _ = _find_dtypes(operation, torch.float32, device_type)
    return "half" if torch.float16 in wide else "widest"


def _find_dtypes(operation: Any, dtype: torch.dtype, device_type: str) -> tuple[frozenset[torch.dtype], bool]:
    """Return the dtypes to which autocast casts inputs of a dtype, and whether it refuses the call."""
    without, _ = _find_first_dtypes(operation, dtype, device_type)
    with _enable_autocast(device_type):
        found, error = _find_first_dtypes(operation, dtype, device_type)
    changed = frozenset[torch.dtype]() if found == without else frozenset(found)
    return changed, "unsafe to autocast" in error


def _find_first_dtypes(operation: Any, dtype: torch.dtype, device_type: str) -> tuple[set[torch.dtype], str]:
    """Return the dtypes of the first operation in a call, or the message of the call's error."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, kind, by_name, default in arguments_of(operation):
        value = _make_value(kind, default, dtype, device_type)
        if by_name:
            named[name] = value
        else:
            positional.append(value)
    try:
        operation(*positional, **named)
    except CastSeenError as seen:
        return seen.dtypes, ""
    except (RuntimeError, ValueError, IndexError) as error:  # no cast: it checks its shapes
        return set(), str(error)
    return set(), ""


def _make_value(kind: str, default: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Return a placeholder of an argument's type; nothing is computed with the placeholder."""
    if kind == "Tensor":
        return valueless_tensor(dtype, device_type)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [valueless_tensor(dtype, device_type)]
    if default is not None or kind.startswith("Optional"):
        return default
    if kind.startswith("List"):
        return [1]
    return {"bool": False, "str": "fro"}.get(kind, 1)


@contextmanager
def _enable_autocast(device_type: str) -> Generator[None]:
    """Turn autocast on, even if the device is absent, where torch.autocast itself would refuse."""
    was_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, was_enabled)
        torch.set_autocast_dtype(device_type, dtype)
