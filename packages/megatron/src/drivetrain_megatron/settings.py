"""The configuration section of the backend: `megatron`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings:
    """The settings by which gradients are averaged over replicas, by torch's DDP.

    What Megatron's own arguments say of a model stands in its `TransformerConfig`, and sizes in `parallel`.

    Attributes:
        requires: The modules that the backend needs; `drivetrain config` names a missing module.
    """

    requires: ClassVar[tuple[str, ...]] = ("megatron",)

    find_unused_parameters: bool = _setting(
        False, "Whether to search each forward for parameters that get no gradient; slower."
    )
    bucket_size_mb: float = _setting(25.0, "Size of a communication bucket in MB.")
    check_drift_every: int | None = _setting(
        None,
        "Interval in optimizer steps at which the replicas' weights are compared; unset: at the first step, "
        "and at saves.",
    )

    def __post_init__(self) -> None:
        """Refuse a value outside its range; the message begins with the field's name."""
        if not self.bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={self.bucket_size_mb!r}: must be above 0")
        if self.check_drift_every is not None and self.check_drift_every < 1:
            raise ValueError(f"check_drift_every={self.check_drift_every!r}: must be at least 1 step")
