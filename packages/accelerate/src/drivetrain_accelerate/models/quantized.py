"""Quantise the linear layers of a model by bitsandbytes, while the model is loaded or when it is in memory."""

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.device_maps import plan_budgets, present_classes
from drivetrain_accelerate.models.model_dispatch import dispatch_model
from drivetrain_accelerate.models.module_tensors import Where, find_tied_parameters
from drivetrain_accelerate.plugins.quantization_config import BnbQuantizationConfig
from drivetrain_dispatch import BitsAndBytes4Bit, BitsAndBytes8Bit, infer_auto_device_map, quantized_sizes
from drivetrain_dispatch import load_checkpoint_and_dispatch as load_and_dispatch
from drivetrain_dispatch.planning.device_map import place_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def load_and_quantize_model(
    model: AnyModule,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | PathLike[str] | None = None,
    device_map: dict[str, int | str | torch.device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    offload_state_dict: bool = False,  # no weight takes host memory twice
) -> AnyModule:
    """Load a model and quantise each linear layer as it is read, or quantise a model that is in memory."""
    config = bnb_quantization_config
    quantization = _quantization(model, config, config.keep_in_fp32_modules or ())
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise ValueError(
            "the model is on the meta device: give weights_location=..., the folder of its weights"
        )
    chosen = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    if weights_location is None:
        _pack_in_memory(model, config, quantization, chosen)
        dispatch_model(model, chosen, offload_dir=offload_folder)
    else:
        known = {part for name, _ in model.named_modules() for part in name.split(".")}
        load_and_dispatch(
            model, Path(weights_location), chosen, dtype=config.torch_dtype, quantization=quantization, strict=False,
            keep_in_fp32_modules=[name for name in config.keep_in_fp32_modules or () if name in known],
            offload_folder=None if offload_folder is None else Path(offload_folder),
        )  # fmt: skip
    shown: Any = model
    shown.hf_device_map = chosen
    shown.is_loaded_in_8bit, shown.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    return model


def _quantization(
    model: nn.Module, config: BnbQuantizationConfig, in_fp32: Collection[str] = ()
) -> BitsAndBytes8Bit | BitsAndBytes4Bit:
    named = config.skip_modules if config.skip_modules is not None else get_keys_to_not_convert(model)
    if config.load_in_8bit:
        return BitsAndBytes8Bit(threshold=config.llm_int8_threshold, skip_modules=(*named, *in_fp32))
    return BitsAndBytes4Bit(
        quant_type=config.bnb_4bit_quant_type,
        double_quant=config.bnb_4bit_use_double_quant,
        compute_dtype=config.bnb_4bit_compute_dtype,
        skip_modules=(*named, *in_fp32),
    )


def _pack_in_memory(
    model: nn.Module,
    config: BnbQuantizationConfig,
    quantization: BitsAndBytes8Bit | BitsAndBytes4Bit,
    device_map: dict[str, Any],
) -> None:
    place = next(
        (place for place in map(place_of, device_map.values()) if place != "disk"), torch.device("cpu")
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not _is_kept(name, quantization.skip_modules or ()):
            weight = module.weight.detach().to(config.torch_dtype).to(place)
            layer = quantization.layer(module, quantization.pack(weight))
            if layer is not None:
                model.set_submodule(name, layer)
    in_fp32 = config.keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            wanted = torch.float32 if _is_kept(name, in_fp32) else config.torch_dtype
            parameter.data = parameter.data.to(wanted)


def _is_kept(name: str, kept: Collection[str]) -> bool:
    return any(each in name.split(".") or name == each or name.startswith(f"{each}.") for each in kept)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | dict[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Any]:
    """Return the device map of a model that is to be quantised."""
    if device_map is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return {"": "cpu" if found is None else torch.accelerator.current_device_index()}
    if not isinstance(device_map, str):
        return dict(device_map)
    config = bnb_quantization_config
    whole = present_classes(model, no_split_module_classes)
    budgets: dict[Where, int | str] = {**plan_budgets(device_map, model, max_memory, whole)}
    sizes = quantized_sizes(model, _quantization(model, config), dtype=config.torch_dtype)
    return infer_auto_device_map(
        model, budgets, dtype=config.torch_dtype, special_sizes=sizes, no_split_module_classes=whole
    )


def replace_with_bnb_layers(
    model: AnyModule,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> AnyModule:
    """Replace linear layers by those of bitsandbytes, whose weights are quantised when they move to a device."""
    quantization = _quantization(model, bnb_quantization_config)
    for name, module in list(model.named_modules()):
        full = ".".join([*(current_key_name or ()), name])
        if name and isinstance(module, nn.Linear) and not _is_kept(full, modules_to_not_convert or ()):
            layer = quantization.layer(module, _make_unpacked(module.weight, bnb_quantization_config))
            assert layer is not None  # bitsandbytes' layers replace torch's
            model.set_submodule(name, layer.requires_grad_(False))
    return model


def _make_unpacked(weight: Tensor, config: BnbQuantizationConfig) -> nn.Parameter:
    """Return a weight of bitsandbytes that is packed when it moves to a device."""
    import bitsandbytes

    library: Any = bitsandbytes.nn
    if config.load_in_8bit:
        return library.Int8Params(weight.data, requires_grad=False, has_fp16_weights=False)
    return library.Params4bit(
        weight.data,
        requires_grad=False,
        quant_type=config.bnb_4bit_quant_type,
        compress_statistics=config.bnb_4bit_use_double_quant,
    )


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of modules to keep in full precision: the output head and modules with tied weights."""
    tied = [name for group in find_tied_parameters(model) for name in group]
    prefix: Any = getattr(model, "base_model_prefix", None)
    is_base = prefix is not None and not hasattr(model, prefix)
    if not tied and is_base:
        return []
    last = [name for name, _ in model.named_children()][-1:]
    names = [name.removesuffix(".weight").removesuffix(".bias") for name in (*tied, *last)]
    return list(dict.fromkeys(names))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a module of a model is a 4-bit layer of bitsandbytes."""
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.partition(".")[0] == "bitsandbytes"
        for module in model.modules()
        for kind in type(module).__mro__
    )


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module."""
    return next(parameter.parameters()).device
