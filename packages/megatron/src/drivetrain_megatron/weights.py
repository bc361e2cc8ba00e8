"""The weights of models in two libraries' names and shapes: a table for each kind of model, read in both directions.

Megatron joins query, key and value into one tensor, group by group; gate and up projection into another; and
lists experts. transformers' GPT-2 has its weights turned. Each form below is a permutation of elements, so that a
model that goes there and back has the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """The numbers of a model that its table is read with.

    Attributes:
        num_layers: The number of blocks.
        num_groups: The number of key and value heads.
        head_size: The number of channels of a head.
        num_experts: The number of experts of a block; 0 without experts.
        is_tied: Whether the head has the weight of the embedding.
    """

    num_layers: int
    num_groups: int
    head_size: int
    num_experts: int = 0
    is_tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Tensors of transformers and what Megatron makes of them, in both directions."""

    join: Callable[[Tensors, TableSizes], Tensors]
    split: Callable[[Tensors, TableSizes], Tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Names in Megatron and in transformers that hold the same elements.

    Attributes:
        ours: The name in Megatron; `{}` stands for the block, and `{expert}` for each expert.
        theirs: The names in transformers.
        form: The form that both have.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form


def _by_group(tensors: Tensors, sizes: TableSizes) -> Tensors:
    """Join query, key and value, of (heads x size, ...), so that each group's heads stand together."""
    grouped = [one.unflatten(0, (sizes.num_groups, -1)) for one in tensors]
    return [torch.cat(grouped, dim=1).flatten(0, 1)]


def _by_kind(tensors: Tensors, sizes: TableSizes) -> Tensors:
    """Split what `_by_group` has joined."""
    grouped = tensors[0].unflatten(0, (sizes.num_groups, -1))
    size = sizes.head_size
    parts = grouped.split([grouped.shape[1] - 2 * size, size, size], dim=1)
    return [part.flatten(0, 1).contiguous() for part in parts]


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


def _same(tensors: Tensors, sizes: TableSizes) -> Tensors:
    del sizes
    return tensors


def _each_turned(tensors: Tensors, sizes: TableSizes) -> Tensors:
    del sizes
    return list(map(_turned, tensors))


COPIED = Form(join=_same, split=_same)
TURNED = Form(join=_each_turned, split=_each_turned)  # a bias stays as it is
GROUPED = Form(join=_by_group, split=_by_kind)
PACKED = Form(
    join=lambda tensors, sizes: _by_group(list(_turned(tensors[0]).chunk(3)), sizes),
    split=lambda tensors, sizes: [_turned(torch.cat(_by_kind(tensors, sizes)))],
)
GATED = Form(
    join=lambda tensors, _: [torch.cat(tensors)],
    split=lambda tensors, _: [half.contiguous() for half in tensors[0].chunk(2)],
)
LISTED = Form(
    join=lambda tensors, _: [expert.contiguous() for expert in tensors[0].unbind()],
    split=lambda tensors, _: [torch.stack(tensors)],
)

_BLOCK, _THEIRS = "decoder.layers.{}.", "model.layers.{}."
_HEAD = TensorRule(ours="output_layer.weight", theirs=("lm_head.weight",), form=COPIED)


def _rule(ours: str, *theirs: str, form: Form = COPIED) -> TensorRule:
    return TensorRule(ours=_BLOCK + ours, theirs=tuple(_THEIRS + name for name in theirs), form=form)


_ATTENTION = (
    TensorRule(ours="embedding.word_embeddings.weight", theirs=("model.embed_tokens.weight",), form=COPIED),
    TensorRule(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",), form=COPIED),
    _HEAD,
    _rule("input_layernorm.weight", "input_layernorm.weight"),
    _rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _rule(
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{kind}_proj.weight" for kind in "qkv"),
        form=GROUPED,
    ),
)
_DENSE = (
    _rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", form=GATED),
    _rule("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_QKV_BIAS = _rule(
    "self_attention.linear_qkv.bias", *(f"self_attn.{kind}_proj.bias" for kind in "qkv"), form=GROUPED
)
_HEAD_NORMS = (
    _rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_EXPERTS = (
    _rule("mlp.router.weight", "mlp.gate.weight"),
    _rule("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.gate_up_proj", form=LISTED),
    _rule("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.down_proj", form=LISTED),
)


def _gpt2() -> tuple[TensorRule, ...]:
    around = {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    }
    within = {
        "input_layernorm": ("ln_1", COPIED),
        "self_attention.linear_qkv": ("attn.c_attn", PACKED),
        "self_attention.linear_proj": ("attn.c_proj", TURNED),
        "pre_mlp_layernorm": ("ln_2", COPIED),
        "mlp.linear_fc1": ("mlp.c_fc", TURNED),
        "mlp.linear_fc2": ("mlp.c_proj", TURNED),
    }
    blocks = [
        TensorRule(ours=f"{_BLOCK}{ours}.{kind}", theirs=(f"transformer.h.{{}}.{theirs}.{kind}",), form=form)
        for ours, (theirs, form) in within.items()
        for kind in ("weight", "bias")
    ]
    return (
        _HEAD,
        *(TensorRule(ours=ours, theirs=(theirs,), form=COPIED) for ours, theirs in around.items()),
        *blocks,
    )


# The tables by transformers' `model_type`.
TABLES: Mapping[str, Sequence[TensorRule]] = MappingProxyType(
    {
        "llama": (*_ATTENTION, *_DENSE),
        "mistral": (*_ATTENTION, *_DENSE),
        "qwen2": (*_ATTENTION, *_DENSE, _QKV_BIAS),
        "qwen3": (*_ATTENTION, *_DENSE, *_HEAD_NORMS),
        "mixtral": (*_ATTENTION, *_EXPERTS),
        "gpt2": _gpt2(),
    }
)


def to_megatron(state: Mapping[str, Tensor], kind: str, sizes: TableSizes) -> dict[str, Tensor]:
    """Return the weights of a model of transformers by Megatron's names. Nothing is divided yet.

    Raises:
        ValueError: The state has other tensors than the table of its kind.
    """
    found: dict[str, Tensor] = {}
    read: set[str] = set()
    for rule, ours, theirs in _pairs(kind, sizes):
        if missing := [name for name in theirs if name not in state]:
            raise ValueError(f"{missing} are not in the state of this {kind} model: give a whole model")
        found |= zip(ours, rule.form.join([state[name] for name in theirs], sizes), strict=True)
        read.update(theirs)
    left = sorted(state.keys() - read - ({"lm_head.weight"} if sizes.is_tied else set()))
    if left:
        raise ValueError(
            f"{left[:5]} of this {kind} model have no place in Megatron's: convert the base model"
        )
    return found


def from_megatron(state: Mapping[str, Tensor], kind: str, sizes: TableSizes) -> dict[str, Tensor]:
    """Return whole weights of Megatron's names by those of transformers.

    Raises:
        ValueError: The state has other tensors than the table of its kind.
    """
    found: dict[str, Tensor] = {}
    read: set[str] = set()
    for rule, ours, theirs in _pairs(kind, sizes):
        if missing := [name for name in ours if name not in state]:
            raise ValueError(f"{missing} are not in this state: give all weights of a {kind} model, whole")
        found |= zip(theirs, rule.form.split([state[name] for name in ours], sizes), strict=True)
        read.update(ours)
    if left := sorted(state.keys() - read):
        raise ValueError(
            f"{left[:5]} of this state have no place in a {kind} model of this config, of {sizes.num_layers} blocks"
            f"{' with a tied head' if sizes.is_tied else ''}: give the config that the model was made of"
        )
    return found


def _pairs(kind: str, sizes: TableSizes) -> list[tuple[TensorRule, list[str], list[str]]]:
    """Return each rule with the names that it stands for, once for each block."""
    found: list[tuple[TensorRule, list[str], list[str]]] = []
    for rule in TABLES[kind]:
        if rule is _HEAD and sizes.is_tied:
            continue
        for layer in range(sizes.num_layers if "{}" in rule.ours else 1):
            ours = rule.ours.replace("{}", str(layer))
            experts = range(sizes.num_experts) if "{expert}" in ours else range(1)
            found.append(
                (
                    rule,
                    [ours.replace("{expert}", str(expert)) for expert in experts],
                    [name.replace("{}", str(layer)) for name in rule.theirs],
                )
            )
    return found
