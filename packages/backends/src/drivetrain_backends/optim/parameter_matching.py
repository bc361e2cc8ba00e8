"""Match optimizers to models by the identity of parameters, before any parameter is replaced."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import PairingError
from drivetrain_backends.modules.compile import strip_wrapper_prefix


def owners(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[int]:
    """Return the indices of the models with parameters of an optimizer; refuse a parameter that no model has."""
    held = [set(model.parameters()) for model in models]
    found: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            where = [i for i, parameters in enumerate(held) if parameter in parameters]
            if not where:
                raise PairingError(
                    f"{type(optimizer).__name__}: parameter {p} of group {g}, of shape {tuple(parameter.shape)}, "
                    "belongs to no prepared model; pass the model to the same prepare() call, or prepare it first, "
                    "and build the optimizer over that model's parameters()"
                )
            found.update(where[:1])
    return sorted(found)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[Tensor, str]:
    """Return a name for every parameter: "name" for a single model, "model.name" for several.

    A tied parameter keeps its first name, as in `named_parameters`. Names leave out what torch.compile adds.
    """
    if len(models) == 1:
        (model,) = models.values()
        return {parameter: strip_wrapper_prefix(name) for name, parameter in model.named_parameters()}
    names: dict[Tensor, str] = {}
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, f"{key}.{strip_wrapper_prefix(name)}")
    return names
