"""Load a model of transformers or diffusers from its folder: build, plan, load and dispatch in one call."""

import copy
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_computed, check_dtype
from drivetrain_dispatch.load_and_dispatch import Way, load_checkpoint_and_dispatch
from drivetrain_dispatch.loading.checkpoint_tensors import Progress
from drivetrain_dispatch.model.meta_init import init_empty_weights
from drivetrain_dispatch.planning.device_map import Device
from drivetrain_dispatch.quantization.block_scaled import BLOCK
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8
from drivetrain_messages import suggest
from drivetrain_weights.regular_file import read_json
from drivetrain_weights.weight_index import find_variant

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
# Arguments of transformers' from_config that are no fields of the configuration.
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_FP8 = "fp8"  # the quant_method of checkpoints that are dequantised while they are read
# Arguments of other libraries' loaders, and their counterparts here.
_ELSEWHERE = {
    "torch_dtype": "dtype",
    "offload_dir": "offload_folder",
    "offload_state_dict": "offload_folder",
    "load_in_4bit": "quantization=BitsAndBytes4Bit()",
    "load_in_8bit": "quantization=BitsAndBytes8Bit()",
    "quantization_config": "quantization",
    "subfolder": "the folder itself",
    "trust_remote_code": "the class itself, which init_empty_weights builds; no code of a folder is run",
}
AnyModel = TypeVar("AnyModel")


def load_pretrained(
    model_class: type[AnyModel],
    folder: Path | str,
    *,
    device_map: Mapping[str, Device] | Way | None = "auto",
    max_memory: Mapping[Device, int | str] | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    variant: str | None = None,
    config: object = None,
    no_split_module_classes: Collection[str] | None = None,
    strict: bool = True,
    progress: Progress | None = None,
    offload_folder: Path | str | None = None,
    release_pages: bool = False,
    offload_buffers: bool = False,
    quantization: Quantization | StoredFP8 | None = None,
    **model_options: Any,
) -> AnyModel:
    """Load a model of transformers or diffusers that may be larger than the accelerator or the machine.

    Like the library's `from_pretrained(folder, device_map=...)`, build the model without memory in the dtype of its
    configuration and plan a device map. Read each weight straight to its device, converted by the library's own
    tables of names and stacks. Dispatch the model in evaluation mode. fp8 weights with block scales (DeepSeek-V3) are
    dequantised while they are read, or kept by `quantization=StoredFP8()`.

    `model_class` may be one of transformers' Auto classes. `dtype="auto"` takes the configuration's dtype, or fp32 if
    it has none. `variant` chooses among several weights in the folder, such as "fp16" for `model.fp16.safetensors`.
    `config`, an object of the library, replaces the folder's configuration. `model_options` replace single fields of
    it, `attn_implementation` and `experts_implementation`. A planned map keeps `no_split_module_classes` whole, by
    default those that the model names. The other arguments are those of `load_checkpoint_and_dispatch`.

    Raises:
        ImportError: The library is not installed.
        TypeError: `model_class` is no model class of these libraries.
        ValueError: The folder has no configuration, or holds a checkpoint that another library quantised.
        WeightsMismatchError: The checkpoint does not fit the model.
        DeviceMapError: No map fits the budgets, or the map does not fit the model or the machine.
    """
    path = _check_folder(folder, dtype, offload_folder)
    build = _choose_builder(model_class)
    model: Any = build(path, None if dtype == "auto" else dtype, config, model_options)
    _keep_in_fp32(model)
    whole = no_split_module_classes
    if whole is None:  # the classes that the model's class keeps whole, if the model contains them
        there = {type(module).__name__ for module in model.modules()}
        whole = there.intersection(getattr(model, "_no_split_modules", None) or ())
    # Keyword arguments, such as caches, that the model moves between devices itself.
    skipped = getattr(model, "_skip_keys_device_placement", None) or getattr(model, "_skip_keys", None) or ()
    load_checkpoint_and_dispatch(
        model, find_variant(path, variant), device_map, max_memory, no_split_module_classes=whole, strict=strict,
        progress=progress, offload_folder=offload_folder, offload_buffers=offload_buffers, quantization=quantization,
        release_pages=release_pages, skip_keys=skipped,
    )  # fmt: skip
    return cast("AnyModel", model.eval())


Build = Callable[[Path, torch.dtype | None, Any, Mapping[str, Any]], nn.Module]


def _check_folder(folder: object, dtype: object, offload_folder: object) -> Path:
    """Check the folder and the dtype of a model, and return the folder."""
    for argument, given in (("folder", folder), ("offload_folder", offload_folder)):
        if not isinstance(given, str | PathLike) and (given is not None or argument == "folder"):
            raise TypeError(f"{argument}={given!r}: give the path of a folder; the model class comes first")
    if dtype != "auto":
        check_dtype("dtype", dtype)
        check_computed("dtype", cast("torch.dtype", dtype), "give another, or quantization=...")
    path = Path(cast("str", folder)).expanduser()
    if path.is_file():
        raise ValueError(
            f"{path} is a file: name the folder that it lies in, and variant=... of several weights"
        )
    if (path / "model_index.json").is_file():
        parts = sorted(part.name for part in path.iterdir() if (part / _CONFIG).is_file())
        raise ValueError(
            f"{path} is a pipeline of several models: load each by itself, from {', '.join(parts)}"
        )
    if not (path / _CONFIG).exists():
        raise ValueError(
            f"{path} has no {_CONFIG}: name the folder of a model; huggingface_hub.snapshot_download(NAME) downloads "
            "one and returns its folder"
        )
    said: object = read_json(path / _CONFIG)
    packed: Any = said.get("quantization_config") if isinstance(said, dict) else None
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    if packed and method != _FP8:
        raise ValueError(
            f"{path / _CONFIG} says the weights are packed ({method}): load such a checkpoint by its library's "
            "from_pretrained, or fetch the weights in full and give quantization=..."
        )
    blocks = packed.get("weight_block_size") if isinstance(packed, dict) else None
    if blocks is not None and list(blocks) != [BLOCK, BLOCK]:
        raise ValueError(
            f"{path / _CONFIG} says weight_block_size={blocks}: blocks of {BLOCK} x {BLOCK} are read; load such a "
            "checkpoint by its library's from_pretrained"
        )
    return path


def _choose_builder(model_class: Any) -> Build:
    """Return the function that builds a model of a class."""
    known = isinstance(model_class, type) and {base.__module__.split(".")[0] for base in model_class.__mro__}
    for method in ("from_config", "_from_config"):  # of Auto classes, of model classes
        if known and "transformers" in known and hasattr(model_class, method):
            return partial(_from_transformers, model_class, getattr(model_class, method))
    if known and "diffusers" in known and hasattr(model_class, "load_config"):
        return partial(_from_diffusers, model_class)
    raise TypeError(
        f"model_class={model_class!r}: give a model class of transformers (AutoModelForCausalLM, "
        "LlamaForCausalLM, ...) or of diffusers; of any other, build it within init_empty_weights() and call "
        "load_checkpoint_and_dispatch"
    )


def _from_transformers(
    model_class: Any,
    from_config: Callable[..., nn.Module],
    path: Path,
    dtype: torch.dtype | None,
    config: Any,
    options: Mapping[str, Any],
) -> nn.Module:
    transformers: Any = import_module("transformers")
    if config is None:
        config_class = getattr(model_class, "config_class", None) or transformers.AutoConfig
        with _explain_errors(path, model_class):
            # Without it, transformers asks on the terminal whether to run the folder's code.
            trust = {"trust_remote_code": False} if config_class is transformers.AutoConfig else {}
            config = config_class.from_pretrained(path, local_files_only=True, **trust)
    config = copy.deepcopy(config)  # a model modifies its configuration
    config.name_or_path = str(path)
    _check_options(options, (*_IMPLEMENTATIONS, *config.to_dict()))
    for name in options.keys() - set(_IMPLEMENTATIONS):
        setattr(config, name, options[name])
    said = {name: value for name, value in options.items() if name in _IMPLEMENTATIONS}
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised while they are read
    named = [part.dtype for part in (config, config.get_text_config()) if isinstance(part.dtype, torch.dtype)]
    chosen = dtype or next(iter(named), torch.float32)
    # Values without memory would be drawn one by one, for nothing; before transformers 5 they are.
    draws = find_spec("transformers.initialization") is None
    undrawn = nullcontext() if draws else import_module("transformers.initialization").no_init_weights()
    with _explain_errors(path, model_class), init_empty_weights(), undrawn:
        model: Any = from_config(config, dtype=chosen, **said)
    model.tie_weights()  # which comes with the initial values
    if model.can_generate() and (path / _GENERATION).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def _from_diffusers(
    model_class: Any, path: Path, dtype: torch.dtype | None, config: Any, options: Mapping[str, Any]
) -> nn.Module:
    if config is None:
        config = model_class.load_config(path, local_files_only=True)
    _check_options(options, tuple(signature(model_class).parameters))
    made = config.get("_class_name") if isinstance(config, Mapping) else None
    if made not in (None, model_class.__name__):
        raise ValueError(
            f"{path / _CONFIG} describes a {made}, not a {model_class.__name__}: give that class"
        )
    before = torch.get_default_dtype()
    try:  # constructors compute some buffers in the default dtype, and positions in fp32
        torch.set_default_dtype(dtype or before)
        with _explain_errors(path, model_class), init_empty_weights():
            model: nn.Module = model_class.from_config(config, **options)
    finally:
        torch.set_default_dtype(before)
    for tensor in model.state_dict(keep_vars=True).values():  # non-persistent buffers keep their dtype
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def _check_options(options: Iterable[str], known: Collection[str]) -> None:
    """Check the names of a model's extra options."""
    for name in options:
        if name in known:
            continue
        if name in _ELSEWHERE:
            raise TypeError(f"load_pretrained: {name!r} is not known: give {_ELSEWHERE[name]}")
        meant = suggest(name, [*signature(load_pretrained).parameters, *known])
        raise TypeError(
            f"load_pretrained: {name!r} is no argument of it and no field of the model's configuration{meant}"
        )


@contextmanager
def _explain_errors(path: Path, model_class: Any) -> Generator[None]:
    """Run the block with errors that name the configuration file if the class rejects it."""
    try:
        # Newer versions validate configurations with an error that is no ValueError.
        invalid: Any = getattr(import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    except ImportError:
        invalid = ValueError
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, invalid) as error:
        raise ValueError(
            f"{path / _CONFIG} does not describe a {model_class.__name__} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): give the class that it was saved by, or another configuration"
        ) from error


def _keep_in_fp32(model: Any) -> None:
    """Convert, on the meta device, the parameters that the model's class keeps in fp32."""
    # transformers has two lists of modules: one for fp16 alone, one for bf16 too.
    dtype = getattr(model, "dtype", torch.float32)
    parts = set[str](getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or not hasattr(model, "_keep_in_fp32_modules_strict"):
        parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not parts or dtype not in (torch.float16, torch.bfloat16):
        return
    pattern = re.compile("|".join(rf"(?:^|\.){part}(?:\.|$)" for part in sorted(parts)))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and pattern.search(name):
            parameter.data = parameter.data.to(torch.float32)
