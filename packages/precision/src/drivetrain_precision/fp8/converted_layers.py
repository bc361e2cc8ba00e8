"""The layers of a model that compute in fp8 already, and what converted them."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from drivetrain_precision.compat import unwrap_compiled
from drivetrain_precision.conversion.class_exchange import exchange_of
from drivetrain_precision.fp8.te_layers import is_te_linear

# torchao's own layers; without their import, by their names.
_OF_TORCHAO = ("Float8Linear", "MXFP8Linear", "NVFP4Linear")


def converted_by(module: nn.Module) -> str | None:
    """Return what converted a layer to fp8, in words; None for any other module."""
    record = exchange_of(module)
    if record is not None:
        return f"{record.recipe} by convert_model" if record.owner == "fp8" else None
    if is_te_linear(module):
        return "Transformer Engine by convert_model"
    own = (each for each in type(module).__mro__ if each.__module__.startswith("torchao."))
    return next((f"{each.__name__} by torchao itself" for each in own if each.__name__ in _OF_TORCHAO), None)


def describe_converted(models: Iterable[nn.Module]) -> str | None:
    """Return how many linear layers of models compute in fp8, and by whom; None if there is none."""
    modules = {each for model in models for each in unwrap_compiled(model).modules()}
    owners = Counter(filter(None, map(converted_by, modules)))
    if not owners:
        return None
    linear = sum(isinstance(each, nn.Linear) or is_te_linear(each) for each in modules)
    shown = ", ".join(f"{count} in {owner}" for owner, count in sorted(owners.items()))
    return f"{owners.total()} of {linear} linear layers, converted before prepare(): {shown}"
