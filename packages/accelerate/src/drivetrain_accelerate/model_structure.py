"""Inspect and compile the modules of a model: wrappers, compiled modules, repeated blocks."""

import sys
from collections.abc import Generator, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from drivetrain_backends.compat import COMPILED_MODULE, modules_in
from drivetrain_backends.modules.autocast_forward import restore_forward


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module was returned by `torch.compile(module)`."""
    return COMPILED_MODULE in dict(module.named_children()) and hasattr(module, "dynamo_ctx")


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module, or any module inside, was returned by `torch.compile`."""
    return any(is_compiled_module(each) for each in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of modules of one class, such as the layers of a transformer."""
    return isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or contains, a list of modules of one class."""
    return any(map(is_repeated_blocks, module.modules()))


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name from the classes of a module and its submodules; None if none has it."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> Any:
    """Return the modules of a model, each after its own submodules."""
    pairs = list(_bottom_up(model, ""))
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(module: nn.Module, name: str) -> Generator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter is divided among ranks as a DTensor."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return a transformers model's number of tensor parallel ranks; None if the model does not have it."""
    return getattr(model, "tp_size", None)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside of DDP, DataParallel and DeepSpeed's engine."""
    compiled = model if is_compiled_module(model) else None
    outer = compiled.get_submodule(COMPILED_MODULE) if compiled is not None else model
    inner = _unwrap(outer)
    if recursive:
        _unwrap_children(inner)
    if not keep_fp32_wrapper:
        restore_forward(inner)
        # Where a program replaced it as Accelerate does.
        if (forward := vars(inner).pop("_original_forward", None)) is not None:
            inner.forward = forward
    if compiled is None or not keep_torch_compile:
        return inner
    return compiled if inner is outer else recompiled(compiled, inner)


def _unwrap(model: nn.Module) -> nn.Module:
    deepspeed: Any = sys.modules.get("deepspeed")  # no engine without its library
    engine = getattr(deepspeed, "DeepSpeedEngine", None)
    wrappers = (DistributedDataParallel, DataParallel, *([engine] if isinstance(engine, type) else []))
    while isinstance(model, wrappers):
        model = cast("nn.Module", model.module)
    return model


def _unwrap_children(model: nn.Module) -> None:
    for name, child in list(model.named_children()):
        inner = _unwrap(child)
        if inner is not child:
            setattr(model, name, inner)
        _unwrap_children(inner)


def recompiled(compiled: Any, inner: nn.Module) -> nn.Module:
    """Return a copy of torch.compile's wrapper, with the same options, around another module."""
    build, arguments, *_ = compiled.__reduce__()
    return build(inner, *arguments[1:])


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of a model, with the same weights, whose repeated blocks are compiled one by one.

    Blocks of one class share their compiled code, which takes less time to compile than the whole model. Modules
    without repeated blocks are compiled whole.
    """
    if is_repeated_blocks(module):
        return nn.ModuleList(_compile(block, compile_kwargs) for block in module.children())
    if not has_repeated_blocks(module):
        return _compile(module, compile_kwargs)
    children = modules_in(module)
    # A deep copy of the dict of its modules alone, in which each is replaced; all else is shared.
    known: dict[int, Any] = {id(value): value for value in vars(module).values() if value is not children}
    for child in module.children():
        known[id(child)] = compile_regions(child, **compile_kwargs)
    return deepcopy(module, known)


def _compile(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    return cast("nn.Module", torch.compile(module, **options))


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile each repeated block in place, and each module without such blocks; keep all names."""
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_deepspeed(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile as `compile_regions_deepspeed` does, in place, and return the module."""
    compile_regions_deepspeed(module, **compile_kwargs)
    return module
