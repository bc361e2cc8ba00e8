"""What a field tells a wizard: when to ask for it, with which recommended answer, and why.

A field carries a function in its metadata, `{"ask": function}`. The function takes what is known, a mapping of plain
values, and returns an `Advice`, or None where nothing is to be asked. It needs no import from drivetrain, so that a
`settings.py` stays within the standard library.

Known are the facts of the machine (`machine.accelerator`, `machine.accelerator_count`, `machine.accelerator_name`,
`machine.accelerator_memory_gib`, `machine.can_bf16`, `machine.can_fp16`, `machine.num_cpus`, `machine.memory_gib`,
`machine.host`, `machine.folder`), what a cluster has decided (`cluster.name`, `cluster.num_nodes`), what is installed
(`installed.backends` and `installed.trackers`, each a mapping of names to summaries), the number of processes that
the answers amount to (`plan.num_processes`), and the value of every setting so far (`run.backend`).
"""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict


class Advice(TypedDict, total=False):
    """The recommended answer to a question.

    Attributes:
        value: The recommended value, as the field holds it.
        why: The reason, in a short clause.
        text: The question; the field's help by default.
        choices: The answers to choose from with a few words on each; the field's closed list by default.
        after: The settings that are asked for first, such as "launch.num_nodes".
    """

    value: Any
    why: str
    text: str
    choices: Mapping[Any, str]
    after: tuple[str, ...]


Known = Mapping[str, Any]
Ask = Callable[[Known], Advice | Mapping[str, Any] | None]
