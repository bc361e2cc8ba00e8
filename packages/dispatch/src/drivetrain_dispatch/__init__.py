"""Build a model without memory, measure it before it is loaded, and keep its ties.

`init_empty_weights` builds a model of any size in no memory, `init_on_device` straight on a device,
`compute_module_sizes` says what each part will take, and `find_tied_parameters` and `retie_parameters` keep shared
parameters shared across loading.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_dispatch.empty import init_empty_weights as init_empty_weights
    from drivetrain_dispatch.empty import init_on_device as init_on_device
    from drivetrain_dispatch.errors import TiedParametersError as TiedParametersError
    from drivetrain_dispatch.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain_dispatch.tied import find_tied_parameters as find_tied_parameters
    from drivetrain_dispatch.tied import retie_parameters as retie_parameters

# Public name -> the file it stands in.
_ROOMS = {
    "TiedParametersError": "errors",
    "compute_module_sizes": "sizes",
    "find_tied_parameters": "tied",
    "init_empty_weights": "empty",
    "init_on_device": "empty",
    "retie_parameters": "tied",
}
__all__ = [
    "TiedParametersError",
    "compute_module_sizes",
    "find_tied_parameters",
    "init_empty_weights",
    "init_on_device",
    "retie_parameters",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_dispatch.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_dispatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
