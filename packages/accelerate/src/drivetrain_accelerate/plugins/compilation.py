"""The options of torch.compile."""

from typing import Any

from drivetrain_accelerate.environment_variables import fill_unsaid, truth
from drivetrain_accelerate.plugins.enums import DynamoBackend
from drivetrain_accelerate.plugins.known_fields import options
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler
from drivetrain_config import environ

_ENV = "ACCELERATE_DYNAMO_"


@options
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
        """Fill the fields; raise a ValueError for an unknown word."""
        fill_unsaid(self, _ENV, backend="no", mode="default", use_regional_compilation=False)
        self.backend = DynamoBackend(str(self.backend).upper())
        fill_unsaid(self, f"{_ENV}USE_", fullgraph=False)
        if self.dynamic is None and (text := environ.read(f"{_ENV}USE_DYNAMIC")) is not None:
            self.dynamic = truth(text, of=f"{_ENV}USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, the backend by torch's own name."""
        return {**super().to_dict(), "backend": str(self.backend.value).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found
