"""Build models of Hugging Face's transformers from their folder, and the inputs of forwards, all without data."""

import logging
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.meta_init import init_empty_weights
from drivetrain_weights.regular_file import read_json

_CONFIG = "config.json"
_CACHES = ("past_key_values", "cache_params", "state")  # names of the state that models carry between tokens


def read_config(folder: Path) -> tuple[Any, Any]:
    """Return the module `transformers`, and the configuration in a folder or a `config.json`."""
    if folder.name == _CONFIG and folder.is_file():
        folder = folder.parent
    if not (folder / _CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {_CONFIG}: name the folder of a Hugging Face model; one of the hub is downloaded "
            f"first, by huggingface_hub.hf_hub_download(NAME, {_CONFIG!r})"
        )
    # torchao, which transformers imports, registers enums in a way that torch 2.15 warns of: no matter of the user's.
    logging.getLogger("torch.utils").setLevel(logging.ERROR)
    try:
        transformers: Any = import_module("transformers")
        # Newer versions validate configurations with an error that is no ValueError.
        invalid = getattr(import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    except ImportError as error:
        raise ImportError(
            "to build a Hugging Face model the package transformers is needed: pip install transformers"
        ) from error
    found = read_json(folder / _CONFIG)
    if said := found.get("quantization_config") if isinstance(found, dict) else None:
        method = said.get("quant_method", "quantised") if isinstance(said, dict) else said
        raise ValueError(
            f"{folder / _CONFIG} has a quantization_config ({method}): its own library loads such a checkpoint; "
            "leave that key out of a copy, and plan with --quantize"
        )
    try:
        return transformers, transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, invalid) as error:
        raise ValueError(f"{folder / _CONFIG} does not describe a model: {error}") from error


def build_empty(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the language model that a folder's config.json describes, without memory."""
    transformers, config = read_config(folder)
    return build_on_meta(
        folder, transformers.AutoModelForCausalLM.from_config, config, dtype, "language model"
    ).eval()


def build_on_meta(
    folder: Path, build: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype | None, what: str
) -> nn.Module:
    """Build the model of a configuration on the meta device; `what` it is called in errors."""
    try:
        with init_empty_weights(include_buffers=True):
            model = build(config)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not describe a {what}: {error}") from error
    named = getattr(config, "dtype", None)
    return model.to(dtype or (named if isinstance(named, torch.dtype) else torch.float32))


def whole_classes(model: nn.Module) -> list[str]:
    """Return the module classes to keep whole: the classes that the model names, or the class of its layers."""
    there = {type(module).__name__ for module in model.modules()}
    if said := sorted(there.intersection(getattr(model, "_no_split_modules", None) or ())):
        return said
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return []
    layers = max(lists, key=len)
    return [Counter(type(layer).__name__ for layer in layers).most_common(1)[0][0]]


def most_tokens(model: nn.Module) -> int | None:
    """Return the largest number of tokens in a prompt; None if the model does not say so."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def check_length(model: nn.Module, num_tokens: int) -> None:
    """Check that a model takes `num_tokens` tokens."""
    most = most_tokens(model)
    if most is not None and num_tokens > most:
        raise ValueError(
            f"{num_tokens} tokens: {type(model).__name__} takes {most} at most; say --seq {most} or less"
        )


def prompt_of(model: nn.Module, batch_size: int, num_tokens: int) -> dict[str, Any]:
    """Return the arguments of the forward over a prompt of shape (batch_size, num_tokens), on the meta device."""
    check_length(model, num_tokens)
    ids = torch.empty(batch_size, num_tokens, dtype=torch.long, device="meta")
    # Generation needs only the logits of the last token.
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    return {"input_ids": ids, "use_cache": True, **last}


def token_after(model: nn.Module, batch_size: int, num_tokens: int) -> dict[str, Any]:
    """Return the arguments of the forward for the token after a prompt: the token, and the cache of the prompt."""
    with torch.no_grad():
        result = model(**prompt_of(model, batch_size, num_tokens))
    caches = {name: cache for name in _CACHES if (cache := getattr(result, name, None)) is not None}
    if not caches:
        raise CostError(
            f"{type(model).__name__} gives none of {', '.join(_CACHES)}, so that a token cannot be told from a "
            "prompt: plan with infer_auto_device_map, and give the cost of each part by hand"
        )
    return {**prompt_of(model, batch_size, 1), **caches}
