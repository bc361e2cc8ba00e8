"""Models of Hugging Face's transformers to train, built on meta, and the inputs of their steps."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.cli.huggingface import build_on_meta, check_length, read_config
from drivetrain_dispatch.errors import CostError

# A label for each sample, not for each token, in the models whose class names contain one of these.
_LABELS_PER_SAMPLE = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "MultipleChoice",
)


def build_to_train(folder: Path, *, dtype: torch.dtype | None, lora_rank: int | None = None) -> nn.Module:
    """Build the model of a folder's config.json for training, without memory; `lora_rank` adds adapters."""
    transformers, config = read_config(folder)
    named = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    build = named or transformers.AutoModelForCausalLM.from_config
    model: Any = build_on_meta(folder, build, config, dtype, "model that can be trained").train()
    if lora_rank is None:
        return model
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ImportError("to estimate adapters the package peft is needed: pip install peft") from error
    adapters = peft.LoraConfig(r=lora_rank, target_modules="all-linear")
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=True).train()


def training_inputs(model: nn.Module, batch_size: int, num_tokens: int) -> dict[str, Tensor]:
    """Return the arguments of a forward in training: samples of shape (batch_size, ...), and labels."""
    inner = getattr(model, "base_model", model)
    inner = getattr(inner, "model", inner) if inner is not model and hasattr(model, "peft_config") else model
    takes = signature(inner.forward).parameters
    config: Any = getattr(inner, "config", None)
    if "input_ids" in takes:
        check_length(inner, num_tokens)
        inputs = {"input_ids": torch.zeros(batch_size, num_tokens, dtype=torch.long)}
        per_token = (batch_size, num_tokens)
    elif "pixel_values" in takes:
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(config, "num_channels", 3)
        pixels = torch.zeros(batch_size, channels, height, width, dtype=next(model.parameters()).dtype)
        inputs, per_token = {"pixel_values": pixels}, (batch_size,)
    else:
        raise CostError(
            f"{type(inner).__name__} takes {', '.join(takes)}: inputs are known for models of tokens (input_ids) and "
            "of pictures (pixel_values)"
        )
    if "labels" in takes:
        per_sample = any(part in type(inner).__name__ for part in _LABELS_PER_SAMPLE)
        inputs["labels"] = torch.zeros(*((batch_size,) if per_sample else per_token), dtype=torch.long)
    return inputs


def loss_of(outputs: Any) -> Tensor:
    """Return the loss of a model's outputs; for a model without one, the mean of its first output."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values: Any = outputs.values() if isinstance(outputs, Mapping) else outputs
    for value in values if isinstance(values, Iterable) and not isinstance(values, Tensor) else [values]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float().mean()
    raise CostError("its forward returns no tensor of floating point numbers, of which a loss could be taken")
