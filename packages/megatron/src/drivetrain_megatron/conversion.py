"""Models of transformers as models of Megatron's layers, and back."""

import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_megatron.compat import routes_tokens
from drivetrain_megatron.divisions import find_cuts
from drivetrain_megatron.layers import HidePadding, block_spec
from drivetrain_megatron.library import GPTModel, TransformerConfig, parallel_state
from drivetrain_megatron.shapes import ModelShape, shape_of
from drivetrain_megatron.stages import number_layers
from drivetrain_megatron.weights import from_megatron, to_megatron
from drivetrain_messages import suggest
from drivetrain_parallel import part_of

_TOKENS = ("embedding.word_embeddings.weight", "output_layer.weight")  # their rows are the vocabulary
_NONE: Mapping[str, Any] = MappingProxyType({})
# Fusions that need kernels of Apex, Transformer Engine or Megatron-LM.
_PLAIN = MappingProxyType(
    dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "apply_rope_fusion",
            "persist_layer_norm",
        ),
        False,
    )
)
_OTHER_AXES = ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
_OPEN = frozenset(
    {*_PLAIN, "sequence_parallel", "attention_dropout", "hidden_dropout"}
)  # of what is said here


def megatron_from_transformers(
    model: nn.Module, *, options: Mapping[str, Any] = _NONE, vocab_multiple: int = 128
) -> GPTModel:
    """Return Megatron's model of the shape and weights of one of transformers: this rank's part of it.

    Called on all ranks, after the Accelerator with `backend="megatron"` is made, which says how ranks divide layers.
    The model given is left as it is; all ranks need the same.

    Args:
        model: A causal language model of transformers, of Llama, Mistral, Qwen2, Qwen3, Mixtral or GPT-2.
        options: Further arguments of Megatron's `TransformerConfig`, such as `sequence_parallel`.
        vocab_multiple: The number that the rows of embedding and head are padded to a multiple of. Checkpoints hold
            the padded rows: keep it from run to run.

    Raises:
        ValueError: Megatron's layers cannot compute what the model's config says, ranks cannot divide its sizes, an
            option changes its shape, or some of its parameters are frozen.
        RuntimeError: Megatron's parallel state has not been made.

    Example:
        accelerator = Accelerator(backend="megatron", parallelism=ParallelDims(tensor=2))
        model = megatron_from_transformers(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
    """
    if not parallel_state.is_initialized():
        raise RuntimeError(
            "megatron_from_transformers() before Accelerator(backend='megatron'): make the Accelerator first, which "
            "says how ranks divide layers"
        )
    source: Any = model
    if not hasattr(source, "config"):
        raise ValueError(
            f"{type(model).__name__} has no config of transformers: give a causal language model of transformers, or "
            "build your own of Megatron's layers"
        )
    shape, first = shape_of(source.config), next(model.parameters())
    dtype = first.dtype
    _check_source(model, shape)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    num_rows = -(-shape.vocab_size // vocab_multiple) * vocab_multiple
    check_sizes(shape.config, num_rows, size=size)
    config = model_config(shape, dtype, options)
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning
        )  # of arguments that Megatron leaves out itself
        spec: Any = block_spec(config)  # of which Megatron declares only one kind
        found = GPTModel(
            config,
            spec,
            vocab_size=num_rows,
            pre_process=is_first,
            post_process=is_last,
            **shape.model,
        )
    found.to(dtype)  # also what torch's norms hold
    weights = to_megatron(plain_weights(source), shape.kind, shape.sizes)
    for name in _TOKENS:
        if name in weights:
            weights[name] = nn.functional.pad(weights[name], (0, 0, 0, num_rows - shape.vocab_size))
    cuts = find_cuts(found, rank=rank, size=size)
    number_layers(found)
    own = dict(found.named_parameters())
    here = {_place(name) for name in own}
    if differing := sorted(own.keys() ^ {name for name in weights if _place(name) in here}):
        raise ValueError(
            f"{differing[:5]} are weights of only one of the two models: leave out the option that adds or drops them"
        )
    parts = {
        name: part_of(weights[name], cuts[parameter], rank, size) if parameter in cuts else weights[name]
        for name, parameter in own.items()
    }
    found.load_state_dict(parts)
    if is_last and num_rows > shape.vocab_size:
        found.output_layer.register_forward_hook(HidePadding(shape.vocab_size, num_rows))
    return found.requires_grad_(first.requires_grad).train(model.training)


def _check_source(model: nn.Module, shape: ModelShape) -> None:
    """Refuse a model that Megatron's layers, or its stages, cannot hold."""
    kind = type(model).__name__
    if shape.sizes.num_experts and not routes_tokens():
        raise ValueError(
            f"{kind} has experts: Megatron-Core 0.16 routes tokens with Transformer Engine alone, which is not "
            "installed; backend='fsdp' with parallel.expert trains the model as it is"
        )
    if len({parameter.requires_grad for parameter in model.parameters()}) > 1:
        raise ValueError(
            f"some parameters of {kind} are frozen, and Megatron joins several into one: convert the model first, "
            "then freeze Megatron's parameters"
        )
    if shape.sizes.is_tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise ValueError(
            f"{kind} has one weight for embedding and head, of which the first and the last stage would each train "
            "one: leave parallel.pipeline out, or untie them"
        )


def _place(name: str) -> str:
    """Return the block that a weight belongs to, or the module outside of blocks; one stage holds it."""
    return ".".join(name.split(".")[: 3 if name.startswith("decoder.layers.") else 1])


def model_config(shape: ModelShape, dtype: torch.dtype, options: Mapping[str, Any]) -> TransformerConfig:
    """Return Megatron's config of a model of some shape, at the sizes of its parallel state."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    arguments: dict[str, Any] = {
        **_PLAIN,
        **shape.config,
        "tensor_model_parallel_size": size,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": dtype,
        # Megatron trains experts with it alone.
        "sequence_parallel": size > 1 and bool(shape.sizes.num_experts),
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": True,  # `prepare` moves the model
        "perform_initialization": False,
        "cuda_graph_scope": None,  # its default is deprecated by itself
    }
    known = [each.name for each in fields(TransformerConfig)]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(
            f"options[{unknown[0]!r}]: no argument of Megatron's TransformerConfig{suggest(unknown[0], known)}"
        )
    if axis := next((name for name in _OTHER_AXES if options.get(name, 1) != 1), None):
        raise ValueError(
            f"options[{axis!r}]={options[axis]}: its models are divided among data, tensor and pipeline here; "
            "backend='fsdp' has parallel.context and parallel.expert"
        )
    if fixed := sorted(options.keys() & arguments.keys() - _OPEN):
        raise ValueError(
            f"options[{fixed[0]!r}]: the model's config, its dtype and the mesh say it; change it there. Of these, "
            f"options may say {', '.join(sorted(_OPEN))}"
        )
    return TransformerConfig(**{**arguments, **options})


def transformers_from_megatron(state: Mapping[str, Any], config: Any) -> Any:
    """Return a model of transformers with weights that Megatron's model has trained.

    Args:
        state: The whole weights by Megatron's names, as `accelerator.get_state_dict(model)` returns them and
            `save_model` writes them. Rows that pad the vocabulary are left out.
        config: The config of the model of transformers.

    Raises:
        ValueError: The state is not of such a model.
    """
    from transformers import AutoModelForCausalLM

    shape = shape_of(config)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name in _TOKENS:
        if name in tensors:
            tensors[name] = tensors[name][: shape.vocab_size]
    weights = from_megatron(tensors, shape.kind, shape.sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=not shape.sizes.is_tied)  # a tied head has the embedding's weight
    return model


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model of transformers by all of their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def check_sizes(config: Mapping[str, Any], num_rows: int, *, size: int) -> None:
    """Refuse sizes that ranks cannot divide."""
    numbers = {
        "attention heads": config["num_attention_heads"],
        "key and value heads": config.get("num_query_groups", config["num_attention_heads"]),
        "channels of the MLP": config["ffn_hidden_size"],
        "rows of the vocabulary (vocab_multiple)": num_rows,
    }
    for name, number in numbers.items():
        if number % size:
            raise ValueError(
                f"tensor={size}: the model has {number} {name}, which {size} ranks cannot divide; say a size of "
                "parallel.tensor that divides them"
            )
