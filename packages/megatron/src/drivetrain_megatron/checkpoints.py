"""The weights in a distributed checkpoint of Megatron's, read whole by torch's own reader, without ranks or CUDA."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

# As Megatron writes the norms before the layers that may contain them, and as its local layers name them.
_NORMS = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
)
_LAYERS, _EXPERTS = "decoder.layers.", "mlp.experts.experts."
_PARTS = ("embedding.", "decoder.", "output_layer.")  # beside which stand states of optimizers


def read_megatron_checkpoint(folder: Path | str) -> dict[str, Tensor]:
    """Return a model's whole weights by the names of its modules; states of optimizers are left out.

    `transformers_from_megatron` makes a model of them. The folder is one that `megatron.core.dist_checkpointing` has
    written in its format `torch_dist`. Its index is a pickle: read what you trust.

    Raises:
        ValueError: The folder holds no weights of a GPT model.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if isinstance(one, TensorStorageMetadata) and name.startswith(_PARTS)
    }
    if not any(name.startswith(_LAYERS) for name in tensors):
        raise ValueError(
            f"{folder} holds no layers of a GPT model, but {sorted(stored)[:5]}: give a folder iter_NNNNNNN of "
            "Megatron-LM's, or one that dist_checkpointing.save() has written"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which tells that one process reads, as is meant
        checkpoint.load({**tensors}, storage_reader=reader, no_dist=True)
    return {ours: part for name, tensor in tensors.items() for ours, part in named_parts(name, tensor)}


def named_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a tensor of a checkpoint, by the names of modules: it begins with layers and experts.

    Example:
        >>> [name for name, _ in named_parts("decoder.layers.mlp.linear_fc2.weight", torch.zeros(2, 3, 4))]
        ['decoder.layers.0.mlp.linear_fc2.weight', 'decoder.layers.1.mlp.linear_fc2.weight']
    """
    if not name.startswith(_LAYERS):
        yield name, tensor
        return
    within = name.removeprefix(_LAYERS)
    for theirs, ours in _NORMS.items():
        within = within.replace(theirs, ours)
    if re.match(r"\d+\.", within):  # layers of several kinds have names of their own
        yield _LAYERS + within, tensor
        return
    for layer, part in enumerate(tensor.unbind()):
        if _EXPERTS not in within:
            yield f"{_LAYERS}{layer}.{within}", part
            continue
        for expert, own in enumerate(part.unbind()):
            listed = within.replace(_EXPERTS, f"mlp.experts.local_experts.{expert}.")
            yield f"{_LAYERS}{layer}.{listed}", own
