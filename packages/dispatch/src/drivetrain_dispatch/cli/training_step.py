"""Build models of transformers to estimate a training step, and the inputs of their forward, all without data."""

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.cli.huggingface import check_length, read_config
from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.meta_init import init_empty_weights

# A label for each sample, not for each token, in the models whose class names contain one of these.
_LABELS_PER_SAMPLE = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "MultipleChoice",
)
_RECOMPUTE = {"use_reentrant": False, "preserve_rng_state": False}


def build_to_train(
    folder: Path, *, dtype: torch.dtype | None, lora_rank: int | None = None, recompute: bool = False
) -> nn.Module:
    """Build the model that a folder's config.json describes, in training mode, on the meta device.

    Its class is the one that the configuration names, else the one for language models. With a `lora_rank`, adapters
    on all linear layers are trained in place of the model.
    """
    transformers, config = read_config(folder)
    named = getattr(config, "dtype", None)
    kind = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    named = named if isinstance(named, torch.dtype) else torch.float32
    try:
        with init_empty_weights(include_buffers=True):
            model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not describe a model that can be trained: {error}") from error
    model = model.train().to(dtype or named)
    if recompute:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ValueError(f"--recompute: {type(model).__name__} cannot compute its activations again")
        trained: Any = model
        if hasattr(model, "activation_checkpointing_enable"):
            trained.activation_checkpointing_enable(activation_checkpointing_kwargs=_RECOMPUTE)
        else:  # its name before transformers 5.10
            trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_RECOMPUTE)
    return model if lora_rank is None else _with_adapters(model, lora_rank, recompute=recompute)


def _with_adapters(model: nn.Module, rank: int, *, recompute: bool) -> nn.Module:
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ImportError("to estimate adapters the package peft is needed: pip install peft") from error
    if recompute:
        model.enable_input_require_grads()  # pyright: ignore[reportCallIssue]
    config = peft.LoraConfig(r=rank, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    return adapted.train()


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
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    first = next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return first.float().mean()
