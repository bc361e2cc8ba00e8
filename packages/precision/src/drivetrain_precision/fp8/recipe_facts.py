"""The facts that the tables of recipes share: generations of GPUs, and formats of products."""

from dataclasses import dataclass

from drivetrain_precision.fp8.protocol import Products


@dataclass(frozen=True, slots=True)
class GPUGeneration:
    """The GPUs that compute a format.

    Attributes:
        name: The GPUs in words.
        capability: The first of their compute capabilities.
    """

    name: str
    capability: tuple[int, int]


ADA = GPUGeneration("an Ada, Hopper or newer GPU", (8, 9))
HOPPER = GPUGeneration("a Hopper or newer GPU", (9, 0))
BLACKWELL = GPUGeneration("a Blackwell or newer GPU", (10, 0))


def products_of(
    forward: str, gradients: str = "", *, weight_gradient: str = "", all_gather: str = "bf16"
) -> Products:
    """Return the formats of a recipe's products.

    Args:
        forward: The formats of the forward.
        gradients: The formats of both gradients; empty if they are those of the forward.
        weight_gradient: The formats of the weight's gradient; empty if they are those of the input's.
        all_gather: The format in which FSDP2 gathers weights.
    """
    gradients = gradients or forward
    return Products(
        forward=forward,
        input_gradient=gradients,
        weight_gradient=weight_gradient or gradients,
        all_gather=all_gather,
    )
