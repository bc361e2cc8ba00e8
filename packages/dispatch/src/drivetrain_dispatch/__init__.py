"""Run a model that does not fit: plan where its weights go, load them straight there, have them come when used.

`init_empty_weights` builds a model of any size in no memory. `load_checkpoint_and_dispatch` plans a device map, reads
each weight to where the map puts it, and leaves what is placed on the disk in the checkpoint's own files. While one
part computes, the weights of the next ones are on their way. `infer_auto_device_map`, `load_checkpoint_in_model` and
`dispatch_model` are its steps; `cpu_offload` and `disk_offload` do without a map. `remove_hooks` ends it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_dispatch.budget import get_max_memory as get_max_memory
    from drivetrain_dispatch.casting import apply_layerwise_casting as apply_layerwise_casting
    from drivetrain_dispatch.device_map import DeviceMap as DeviceMap
    from drivetrain_dispatch.dispatching import dispatch_model as dispatch_model
    from drivetrain_dispatch.dispatching import offload_stats as offload_stats
    from drivetrain_dispatch.dispatching import remove_hooks as remove_hooks
    from drivetrain_dispatch.dispatching import trace_offload as trace_offload
    from drivetrain_dispatch.empty import init_empty_weights as init_empty_weights
    from drivetrain_dispatch.empty import init_on_device as init_on_device
    from drivetrain_dispatch.errors import CostError as CostError
    from drivetrain_dispatch.errors import DeviceMapError as DeviceMapError
    from drivetrain_dispatch.errors import LoadError as LoadError
    from drivetrain_dispatch.errors import OffloadedError as OffloadedError
    from drivetrain_dispatch.errors import TiedParametersError as TiedParametersError
    from drivetrain_dispatch.errors import WeightFilesError as WeightFilesError
    from drivetrain_dispatch.errors import WeightsMismatchError as WeightsMismatchError
    from drivetrain_dispatch.groups import Cost as Cost
    from drivetrain_dispatch.infer import infer_auto_device_map as infer_auto_device_map
    from drivetrain_dispatch.load import LoadReport as LoadReport
    from drivetrain_dispatch.load import load_checkpoint_in_model as load_checkpoint_in_model
    from drivetrain_dispatch.loaded import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from drivetrain_dispatch.offloading import OffloadHook as OffloadHook
    from drivetrain_dispatch.offloading import cpu_offload as cpu_offload
    from drivetrain_dispatch.offloading import cpu_offload_with_hook as cpu_offload_with_hook
    from drivetrain_dispatch.offloading import disk_offload as disk_offload
    from drivetrain_dispatch.optimizer_state import OptimizerOffload as OptimizerOffload
    from drivetrain_dispatch.optimizer_state import disk_offload_optimizer as disk_offload_optimizer
    from drivetrain_dispatch.pretrained import load_pretrained as load_pretrained
    from drivetrain_dispatch.quantization import Quantization as Quantization
    from drivetrain_dispatch.quantization import StoredFP8 as StoredFP8
    from drivetrain_dispatch.quantization import quantized_sizes as quantized_sizes
    from drivetrain_dispatch.quantizers import BitsAndBytes4Bit as BitsAndBytes4Bit
    from drivetrain_dispatch.quantizers import BitsAndBytes8Bit as BitsAndBytes8Bit
    from drivetrain_dispatch.quantizers import TorchAO as TorchAO
    from drivetrain_dispatch.seats import OffloadStats as OffloadStats
    from drivetrain_dispatch.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain_dispatch.tied import find_tied_parameters as find_tied_parameters
    from drivetrain_dispatch.tied import retie_parameters as retie_parameters
    from drivetrain_dispatch.timeline import Rates as Rates
    from drivetrain_dispatch.trace import OffloadTrace as OffloadTrace

# Public name -> the file it stands in.
_ROOMS = {
    "BitsAndBytes4Bit": "quantizers",
    "BitsAndBytes8Bit": "quantizers",
    "Cost": "groups",
    "CostError": "errors",
    "DeviceMap": "device_map",
    "DeviceMapError": "errors",
    "LoadError": "errors",
    "LoadReport": "load",
    "OffloadHook": "offloading",
    "OffloadStats": "seats",
    "OffloadTrace": "trace",
    "OffloadedError": "errors",
    "OptimizerOffload": "optimizer_state",
    "Quantization": "quantization",
    "Rates": "timeline",
    "StoredFP8": "quantization",
    "TiedParametersError": "errors",
    "TorchAO": "quantizers",
    "WeightFilesError": "errors",
    "WeightsMismatchError": "errors",
    "apply_layerwise_casting": "casting",
    "compute_module_sizes": "sizes",
    "cpu_offload": "offloading",
    "cpu_offload_with_hook": "offloading",
    "disk_offload": "offloading",
    "disk_offload_optimizer": "optimizer_state",
    "dispatch_model": "dispatching",
    "find_tied_parameters": "tied",
    "get_max_memory": "budget",
    "infer_auto_device_map": "infer",
    "init_empty_weights": "empty",
    "init_on_device": "empty",
    "load_checkpoint_and_dispatch": "loaded",
    "load_checkpoint_in_model": "load",
    "load_pretrained": "pretrained",
    "offload_stats": "dispatching",
    "quantized_sizes": "quantization",
    "remove_hooks": "dispatching",
    "retie_parameters": "tied",
    "trace_offload": "dispatching",
}
__all__ = [
    "BitsAndBytes4Bit",
    "BitsAndBytes8Bit",
    "Cost",
    "CostError",
    "DeviceMap",
    "DeviceMapError",
    "LoadError",
    "LoadReport",
    "OffloadHook",
    "OffloadStats",
    "OffloadTrace",
    "OffloadedError",
    "OptimizerOffload",
    "Quantization",
    "Rates",
    "StoredFP8",
    "TiedParametersError",
    "TorchAO",
    "WeightFilesError",
    "WeightsMismatchError",
    "apply_layerwise_casting",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "disk_offload_optimizer",
    "dispatch_model",
    "find_tied_parameters",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_pretrained",
    "offload_stats",
    "quantized_sizes",
    "remove_hooks",
    "retie_parameters",
    "trace_offload",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_dispatch.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_dispatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
