"""The facts that the tables of recipes share: generations of GPUs, and formats of products."""

from dataclasses import dataclass

from drivetrain_precision.fp8.protocol import Products


@dataclass(frozen=True, slots=True)
class GPUGeneration:
    """The GPUs that compute a format, and the first of their compute capabilities."""

    name: str
    capability: tuple[int, int]


ADA = GPUGeneration("an Ada, Hopper or newer GPU", (8, 9))
HOPPER = GPUGeneration("a Hopper or newer GPU", (9, 0))
BLACKWELL = GPUGeneration("a Blackwell or newer GPU", (10, 0))


def products_of(
    forward: str, gradients: str = "", *, weight_gradient: str = "", all_gather: str = "bf16"
) -> Products:
    """Return the formats of a recipe's products; those of a gradient that is not given are those before it."""
    gradients = gradients or forward
    return Products(
        forward=forward,
        input_gradient=gradients,
        weight_gradient=weight_gradient or gradients,
        all_gather=all_gather,
    )
