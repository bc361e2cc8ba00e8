"""The settings of the interface of Accelerate."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """The `accelerate` section: how programs written for Accelerate run."""

    strict: bool = field(
        default=True,
        metadata={
            "help": "Whether programs written for Accelerate get the right result, or an error, where Accelerate "
            "goes wrong without a word; without it they get what Accelerate gives, where that can be restored."
        },
    )
