"""The options of torch.compile."""

from dataclasses import dataclass
from typing import Any

from drivetrain_accelerate.plugins.enums import DynamoBackend
from drivetrain_accelerate.plugins.environment_words import truth, truth_from, word_from
from drivetrain_accelerate.plugins.known_fields import with_known_fields
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler
from drivetrain_config import environ


@with_known_fields
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`; those not given come from the environment.

    Attributes:
        backend: The compiler, by name in any case; `NO` compiles nothing.
        mode: torch's mode, such as "max-autotune".
        fullgraph: Whether a model must be one graph.
        dynamic: Whether shapes are variables; None: torch finds out.
        options: Options of the compiler.
        disable: Whether torch.compile does nothing.
        use_regional_compilation: Whether to compile repeated blocks one by one.
    """

    backend: DynamoBackend = None  # pyright: ignore[reportAssignmentType] filled below
    mode: str = None  # pyright: ignore[reportAssignmentType]
    fullgraph: bool = None  # pyright: ignore[reportAssignmentType]
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        """Fill the fields.

        Raises:
            ValueError: The backend or a truth value is unknown.
        """
        prefix = "ACCELERATE_DYNAMO"
        given: Any = self.backend
        name = word_from(f"{prefix}_BACKEND", "no") if given is None else given
        self.backend = DynamoBackend(str(name).upper())
        if _is_unsaid(self.mode):
            self.mode = word_from(f"{prefix}_MODE", "default")
        if _is_unsaid(self.fullgraph):
            self.fullgraph = truth_from(f"{prefix}_USE_FULLGRAPH")
        if _is_unsaid(self.use_regional_compilation):
            self.use_regional_compilation = truth_from(f"{prefix}_USE_REGIONAL_COMPILATION")
        if self.dynamic is None and (text := environ.read(f"{prefix}_USE_DYNAMIC")) is not None:
            self.dynamic = truth(text, of=f"{prefix}_USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, the backend by torch's own name."""
        found = super().to_dict()
        found["backend"] = str(found["backend"].value).lower()
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found


def _is_unsaid(value: object) -> bool:
    return value is None
