"""The advice of a field to a wizard: when to ask for the field, the recommended answer, and the reason.

A field's metadata holds a function, `{"ask": function}`, or its place, `{"ask": "package.module:function"}`, which a
launch does not import. The function takes a mapping of known values, and returns an `Advice`, or None for no
question. It needs no import from drivetrain.

The known values are:

- The facts of the machine: `machine.` with `accelerator`, `accelerator_count`, `accelerator_name`,
  `accelerator_memory_bytes`, `can_bf16`, `can_fp16`, `num_cpus`, `memory_bytes`, `host` or `folder`.
- The decisions of a cluster: `cluster.name` and `cluster.num_nodes`.
- The installed plug-ins: `installed.backends` and `installed.trackers`, each a mapping of names to summaries.
- The number of processes that follows from the answers: `plan.num_processes`.
- The value of every setting so far, such as `run.backend`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypedDict, cast

from drivetrain_config.errors import ConfigError


class Advice(TypedDict, total=False):
    """The recommended answer to a question.

    Attributes:
        value: The recommended value, of the field's type.
        why: The reason, in a short clause.
        text: The question; the field's help by default.
        choices: The answers to choose from with a few words on each; the field's closed list by default.
        after: The settings whose questions come first, such as "launch.num_nodes".
    """

    value: Any
    why: str
    text: str
    choices: Mapping[Any, str]
    after: tuple[str, ...]


Known = Mapping[str, Any]
Ask = Callable[[Known], Advice | Mapping[str, Any] | None]


def advice_of(ask: Ask | str | None, known: Known) -> Advice | Mapping[str, Any] | None:
    """Return the advice of a field's function; None without a function or a question."""
    if ask is None:
        return None
    if isinstance(ask, str):
        module, _, name = ask.partition(":")
        try:
            ask = cast("Ask", getattr(import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"ask={ask!r} in the metadata of a field: {error}; say package.module:function, or the function "
                "itself"
            ) from error
    advice = ask(known)
    allowed = Advice.__annotations__
    if advice is not None and (unknown := sorted(set(advice) - set(allowed))):
        raise ConfigError(f"{ask}: an advice has no {unknown[0]!r}; it may have {', '.join(allowed)}")
    return advice
