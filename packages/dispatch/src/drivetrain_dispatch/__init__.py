"""Build a model without memory, measure it before it is loaded, and keep its ties.

`init_empty_weights` builds a model of any size in no memory, `init_on_device` straight on a device,
`compute_module_sizes` says what each part will take, and `find_tied_parameters` and `retie_parameters` keep shared
parameters shared across loading.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_dispatch.budget import get_balanced_memory as get_balanced_memory
    from drivetrain_dispatch.budget import get_max_memory as get_max_memory
    from drivetrain_dispatch.device_map import DeviceMap as DeviceMap
    from drivetrain_dispatch.dispatching import dispatch_model as dispatch_model
    from drivetrain_dispatch.dispatching import offload_stats as offload_stats
    from drivetrain_dispatch.dispatching import remove_hooks as remove_hooks
    from drivetrain_dispatch.empty import init_empty_weights as init_empty_weights
    from drivetrain_dispatch.empty import init_on_device as init_on_device
    from drivetrain_dispatch.errors import DeviceMapError as DeviceMapError
    from drivetrain_dispatch.errors import OffloadedError as OffloadedError
    from drivetrain_dispatch.errors import TiedParametersError as TiedParametersError
    from drivetrain_dispatch.errors import WeightFilesError as WeightFilesError
    from drivetrain_dispatch.infer import infer_auto_device_map as infer_auto_device_map
    from drivetrain_dispatch.offloading import OffloadHook as OffloadHook
    from drivetrain_dispatch.offloading import cpu_offload as cpu_offload
    from drivetrain_dispatch.offloading import cpu_offload_with_hook as cpu_offload_with_hook
    from drivetrain_dispatch.offloading import disk_offload as disk_offload
    from drivetrain_dispatch.seats import OffloadStats as OffloadStats
    from drivetrain_dispatch.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain_dispatch.tied import find_tied_parameters as find_tied_parameters
    from drivetrain_dispatch.tied import retie_parameters as retie_parameters

# Public name -> the file it stands in.
_ROOMS = {
    "DeviceMap": "device_map",
    "DeviceMapError": "errors",
    "OffloadHook": "offloading",
    "OffloadStats": "seats",
    "OffloadedError": "errors",
    "TiedParametersError": "errors",
    "WeightFilesError": "errors",
    "compute_module_sizes": "sizes",
    "cpu_offload": "offloading",
    "cpu_offload_with_hook": "offloading",
    "disk_offload": "offloading",
    "dispatch_model": "dispatching",
    "find_tied_parameters": "tied",
    "get_balanced_memory": "budget",
    "get_max_memory": "budget",
    "infer_auto_device_map": "infer",
    "init_empty_weights": "empty",
    "init_on_device": "empty",
    "offload_stats": "dispatching",
    "remove_hooks": "dispatching",
    "retie_parameters": "tied",
}
__all__ = [
    "DeviceMap",
    "DeviceMapError",
    "OffloadHook",
    "OffloadStats",
    "OffloadedError",
    "TiedParametersError",
    "WeightFilesError",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "offload_stats",
    "remove_hooks",
    "retie_parameters",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_dispatch.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_dispatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
