"""Run models larger than the accelerator or the machine: plan a device map, load by it, fetch weights at use.

`init_empty_weights` builds a model of any size without memory. `load_checkpoint_and_dispatch` plans a device map,
reads each weight straight to its device, and leaves weights placed on the disk in the checkpoint's own files. While
one module computes, the weights of the next ones are prefetched. `infer_auto_device_map`, `load_checkpoint_in_model`
and `dispatch_model` are the single steps; `cpu_offload` and `disk_offload` need no device map. `remove_hooks` makes a
model ordinary again.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_dispatch.errors import CostError as CostError
    from drivetrain_dispatch.errors import DeviceMapError as DeviceMapError
    from drivetrain_dispatch.errors import LoadError as LoadError
    from drivetrain_dispatch.errors import OffloadedError as OffloadedError
    from drivetrain_dispatch.errors import TiedParametersError as TiedParametersError
    from drivetrain_dispatch.errors import WeightFilesError as WeightFilesError
    from drivetrain_dispatch.errors import WeightsMismatchError as WeightsMismatchError
    from drivetrain_dispatch.load_and_dispatch import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from drivetrain_dispatch.loading.load_checkpoint import LoadReport as LoadReport
    from drivetrain_dispatch.loading.load_checkpoint import (
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from drivetrain_dispatch.model.meta_init import init_empty_weights as init_empty_weights
    from drivetrain_dispatch.model.meta_init import init_on_device as init_on_device
    from drivetrain_dispatch.model.model_layout import compute_module_sizes as compute_module_sizes
    from drivetrain_dispatch.offload.cpu_offload import OffloadHook as OffloadHook
    from drivetrain_dispatch.offload.cpu_offload import cpu_offload as cpu_offload
    from drivetrain_dispatch.offload.cpu_offload import cpu_offload_with_hook as cpu_offload_with_hook
    from drivetrain_dispatch.offload.cpu_offload import disk_offload as disk_offload
    from drivetrain_dispatch.offload.dispatch import dispatch_model as dispatch_model
    from drivetrain_dispatch.offload.dispatch import offload_stats as offload_stats
    from drivetrain_dispatch.offload.dispatch import remove_hooks as remove_hooks
    from drivetrain_dispatch.offload.dispatch import trace_offload as trace_offload
    from drivetrain_dispatch.offload.layerwise_casting import (
        apply_layerwise_casting as apply_layerwise_casting,
    )
    from drivetrain_dispatch.offload.optimizer_offload import OptimizerOffload as OptimizerOffload
    from drivetrain_dispatch.offload.optimizer_offload import disk_offload_optimizer as disk_offload_optimizer
    from drivetrain_dispatch.offload.residency import OffloadStats as OffloadStats
    from drivetrain_dispatch.offload.trace import OffloadTrace as OffloadTrace
    from drivetrain_dispatch.planning.block_groups import BlockCost as BlockCost
    from drivetrain_dispatch.planning.device_map import DeviceMap as DeviceMap
    from drivetrain_dispatch.planning.infer_device_map import infer_auto_device_map as infer_auto_device_map
    from drivetrain_dispatch.planning.memory_budget import get_max_memory as get_max_memory
    from drivetrain_dispatch.planning.pipeline_model import Bandwidths as Bandwidths
    from drivetrain_dispatch.pretrained import load_pretrained as load_pretrained
    from drivetrain_dispatch.quantization.libraries import BitsAndBytes4Bit as BitsAndBytes4Bit
    from drivetrain_dispatch.quantization.libraries import BitsAndBytes8Bit as BitsAndBytes8Bit
    from drivetrain_dispatch.quantization.libraries import TorchAO as TorchAO
    from drivetrain_dispatch.quantization.protocol import Quantization as Quantization
    from drivetrain_dispatch.quantization.protocol import StoredFP8 as StoredFP8
    from drivetrain_dispatch.quantization.protocol import quantized_sizes as quantized_sizes
    from drivetrain_weights import find_tied_parameters as find_tied_parameters
    from drivetrain_weights import retie_parameters as retie_parameters

# Module -> its public names.
_NAMES = {
    "drivetrain_weights": "find_tied_parameters retie_parameters",
    "errors": "CostError DeviceMapError LoadError OffloadedError TiedParametersError WeightFilesError "
    "WeightsMismatchError",
    "load_and_dispatch": "load_checkpoint_and_dispatch",
    "loading.load_checkpoint": "load_checkpoint_in_model LoadReport",
    "model.meta_init": "init_empty_weights init_on_device",
    "model.model_layout": "compute_module_sizes",
    "offload.cpu_offload": "cpu_offload cpu_offload_with_hook disk_offload OffloadHook",
    "offload.dispatch": "dispatch_model offload_stats remove_hooks trace_offload",
    "offload.layerwise_casting": "apply_layerwise_casting",
    "offload.optimizer_offload": "disk_offload_optimizer OptimizerOffload",
    "offload.residency": "OffloadStats",
    "offload.trace": "OffloadTrace",
    "planning.block_groups": "BlockCost",
    "planning.device_map": "DeviceMap",
    "planning.infer_device_map": "infer_auto_device_map",
    "planning.memory_budget": "get_max_memory",
    "planning.pipeline_model": "Bandwidths",
    "pretrained": "load_pretrained",
    "quantization.libraries": "BitsAndBytes4Bit BitsAndBytes8Bit TorchAO",
    "quantization.protocol": "Quantization quantized_sizes StoredFP8",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            home = _MODULES[name]
            module = home if home == "drivetrain_weights" else f"drivetrain_dispatch.{home}"
            return getattr(import_module(module), name)
        raise AttributeError(f"module 'drivetrain_dispatch' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
