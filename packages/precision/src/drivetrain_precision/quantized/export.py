"""Write a model trained by `prepare_qat` in the format of quantised inference, and load such a file."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.layer_conversion import converted_by
from drivetrain_precision.quantized.fake_quantize import QuantizedScheme, fake_quantized, scheme_of

_FILE = "model.safetensors"


def quantized_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a model from `prepare_qat`, quantized as its layers round them.

    The model is unchanged, and its training can continue. A tensor with several names is listed under the first name.
    Quantized weights are torchao's tensors.
    """
    _check(model)
    schemes = {
        f"{name}.weight" if name else "weight": scheme_of(module) for name, module in fake_quantized(model)
    }
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        plain = value.detach()
        state[name] = _quantize(plain, schemes[name]) if name in schemes else plain
    return state


def export_quantized(model: nn.Module, folder: Path | str) -> Path:
    """Write a model from `prepare_qat` into a folder for inference; return the path of the weights' file.

    `load_quantized` reads the folder. For a model of transformers, the folder has a `config.json`, and
    `from_pretrained` reads the folder too. Called on one rank:

        with accelerator.gathered(model):  # on all ranks
            if accelerator.is_main_process:
                export_quantized(accelerator.unwrap_model(model), folder)

    Args:
        model: The model with its full weights; its training can continue.
        folder: The destination, created if missing; an earlier export in it is replaced.

    Raises:
        PrecisionError: No layer rounds its weight, the weights are divided among ranks, or adapters are not merged.
    """
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = {
        name: value.contiguous() if type(value) is Tensor else value
        for name, value in quantized_state(model).items()
    }
    flatten: Any = flatten_tensor_state_dict
    tensors, metadata = flatten(state)
    path = Path(folder, _FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_config(model, path.parent)
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(tensors, unfinished, metadata={"format": "pt", **metadata})
        unfinished.chmod(mode)  # the library makes files that only their owner can read (safetensors 0.8)
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_quantized(model: nn.Module, folder: Path | str) -> None:
    """Load an export into a plain model; its linear layers then compute with torchao's quantized tensors.

    The model must be built as before `prepare_qat`; it may be on the meta device, without memory. The call freezes
    its parameters.

    Raises:
        PrecisionError: The model's layers round their weights or compute in fp8, a weight has another shape, or the
            file has a key twice.
        RuntimeError: The export's names differ from the model's.
    """
    _check_plain(model)
    state = _read(Path(folder, _FILE))
    held = model.state_dict(keep_vars=True)
    unlike = [name for name in held if name in state and held[name].shape != state[name].shape]
    if unlike:
        first = unlike[0]
        more = f", as are {len(unlike) - 1} more" if len(unlike) > 1 else ""
        raise PrecisionError(
            f"{first} has the shape {tuple(state[first].shape)} in the export and {tuple(held[first].shape)} in the "
            f"model{more}: build the model with the sizes that it was trained with"
        )
    parameters: dict[int, nn.Parameter] = {}
    for name, value in held.items():
        if isinstance(value, nn.Parameter) and name in state:
            parameters[id(value)] = nn.Parameter(state[name], requires_grad=False)
        if id(value) in parameters:  # under each name of a tied one
            state[name] = parameters[id(value)]
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)


def _check_plain(model: nn.Module) -> None:
    """Raise PrecisionError for a model with layers that round weights or compute in fp8."""
    if any(True for _ in fake_quantized(model)):
        raise PrecisionError(
            "load_quantized loads into a plain model: build a new one, or call undo_qat(model) first"
        )
    for name, module in model.named_modules():
        if (owner := converted_by(module)) is not None:
            raise PrecisionError(
                f"load_quantized loads into a plain model, and {name or type(module).__name__} computes in fp8 "
                f"({owner}), which cannot multiply quantised weights: build a new one, or call "
                "restore_model(model, recipe) first"
            )


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise PrecisionError(f"{path} is no regular file: name the folder of an export")
    with safe_open(path, framework="pt") as file:
        _check_header(path)
        metadata = cast("dict[str, str]", file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # torchao 0.18 reads no names without a dot, such as those of a model's own parameters.
    names: list[str] = json.loads(metadata["tensor_names"])
    own = {name: tensors.pop(name) for name in names if "." not in name}
    inner = {**metadata, "tensor_names": json.dumps([name for name in names if "." in name])}
    unflatten: Any = unflatten_tensor_state_dict
    return {**own, **unflatten(tensors, inner)[0]}


def _check_header(path: Path) -> None:
    """Raise PrecisionError if a header has a key twice; the library would take the last."""

    def check(pairs: list[tuple[str, object]]) -> None:
        if len(dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PrecisionError(f"the header of {path} has the key {twice!r} twice: write the export again")

    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=check)


def _quantize(weight: Tensor, scheme: QuantizedScheme) -> Tensor:
    from torchao.quantization import quantize_

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(linear, scheme.config())
    return linear.weight.detach()


def _check(model: nn.Module) -> None:
    layers = dict(fake_quantized(model))
    if not layers:
        raise PrecisionError(
            f"no layer of {type(model).__name__} was prepared by prepare_qat, so the scheme to quantise it is unknown"
        )
    if "" in layers:
        raise PrecisionError("the model is a single linear layer: put it into an nn.Sequential")
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            raise PrecisionError(
                f"{name} has adapters beside its weight: model.merge_and_unload() first adds them to the weights"
            )
    for name, value in model.state_dict(keep_vars=True).items():
        # DeepSpeed's stage 3 leaves an empty tensor where a weight was, and notes how many elements it has.
        if hasattr(value, "full_tensor") or getattr(value, "ds_numel", value.numel()) != value.numel():
            raise PrecisionError(
                f"{name} is divided among ranks: export inside `with accelerator.gathered(model):`, on all ranks"
            )


def _write_config(model: nn.Module, folder: Path) -> None:
    """Write the configuration of a model of transformers, with the quantization for `from_pretrained`."""
    from torchao.core.config import config_to_dict

    plain: Any = getattr(model, "config", None)
    if not hasattr(plain, "save_pretrained"):
        return
    layers = dict(fake_quantized(model))
    config = deepcopy(plain)
    # fully_shard derives a class of its own from the model's.
    config.architectures = [
        next(each.__name__ for each in type(model).__mro__ if not issubclass(each, FSDPModule))
    ]
    config.quantization_config = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(scheme_of(next(iter(layers.values()))).config())},
        "modules_to_not_convert": [
            name
            for name, each in model.named_modules()
            if isinstance(each, nn.Linear | nn.Embedding) and name not in layers
        ],
    }
    config.save_pretrained(folder)
