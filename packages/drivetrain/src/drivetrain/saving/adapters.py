"""Export the adapters of PEFT models, in the files and under the names that PEFT itself reads."""

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain_backends import Prepared, full_tensor, unwrap_compiled
from drivetrain_checkpoint import ExportPlan, TensorInfo, write_tensor_file
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_each_rank

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of every name in PEFT's files


def has_adapters(module: nn.Module) -> bool:
    """Return whether a model holds PEFT adapters: a `PeftModel`, or a transformers model after `add_adapter`."""
    config = getattr(module, "peft_config", None)
    return isinstance(config, Mapping) and bool(config)


def save_adapters(
    prepared: Prepared, context: Context, folder: Path, *, metadata: Mapping[str, str]
) -> ExportPlan:
    """Write every adapter of a model as `PeftModel.save_pretrained` does. Called on all ranks.

    The adapter "default" goes into the folder itself, every other one into a subfolder of its name. The main process
    gathers only the adapters in full.

    Args:
        prepared: The prepared PEFT model.
        context: The context of this process.
        folder: The destination folder, created if missing.
        metadata: The metadata written into the header of every file.

    Returns:
        The plan of which file holds which tensor.
    """
    module = unwrap_compiled(prepared.unwrap())
    state = prepared.state_dict()["model"]
    found = {name: _adapter_state(module, name, state) for name in _configs(module)}
    is_main = context.topology.is_main
    full: dict[str, dict[str, Tensor]] = {adapter: {} for adapter in found}
    for adapter, values in found.items():
        for name, value in values.items():
            tensor = full_tensor(value)  # collective: all ranks gather, in the same order
            if is_main:
                full[adapter][name] = tensor.detach().cpu().contiguous()
    places = {adapter: "" if adapter == "default" else f"{adapter}/" for adapter in found}

    def write() -> None:
        for adapter, tensors in full.items() if is_main else ():
            place = folder / places[adapter]
            place.mkdir(parents=True, exist_ok=True)
            write_tensor_file(place / ADAPTER_FILE, tensors, metadata=metadata)
            _config_to_write(module, adapter).save_pretrained(str(place))

    on_each_rank(context, write, doing=f"the export into {folder}")
    return ExportPlan(
        files={f"{places[adapter]}{ADAPTER_FILE}": tuple(values) for adapter, values in found.items()},
        tensors={
            f"{places[adapter]}{name}": TensorInfo(shape=tuple(value.shape), dtype=value.dtype)
            for adapter, values in found.items()
            for name, value in values.items()
        },
    )


def _configs(module: nn.Module) -> Mapping[str, Any]:
    configs: Any = module.peft_config
    return configs


def _adapter_state(module: nn.Module, adapter: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's part of a state, under the names in its file."""
    from peft import PeftModel, get_peft_model_state_dict

    found: dict[str, Any] = get_peft_model_state_dict(
        module,
        state_dict=dict(state),
        adapter_name=adapter,
        save_embedding_layers=_trains_embeddings(module),  # "auto" would query the hub
    )
    if isinstance(module, PeftModel):
        return found
    # A transformers model with add_adapter has no wrapper, so its names lack the prefix that PEFT reads.
    return {f"{_PREFIX}{name}": value for name, value in found.items()}


def _trains_embeddings(module: nn.Module) -> bool:
    """Return whether the input embeddings, or adapters on them, are trained."""
    embeddings_of = getattr(module, "get_input_embeddings", None)
    if embeddings_of is None:
        return False
    try:
        embeddings = embeddings_of()
    except NotImplementedError:
        return False
    return isinstance(embeddings, nn.Module) and any(p.requires_grad for p in embeddings.parameters())


def _config_to_write(module: nn.Module, adapter: str) -> Any:
    """Return a copy of an adapter's configuration, in inference mode and with the name of its base model."""
    config = copy(_configs(module)[adapter])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        base = module.get_base_model() if hasattr(module, "get_base_model") else module  # pyright: ignore[reportCallIssue]
        config.base_model_name_or_path = getattr(base, "name_or_path", None)
    return config
