"""Layers of Transformer Engine made of torch's, and back, around the same parameters.

A layer is built without memory and takes over the parameters of the other: their values, dtype, device and
`requires_grad` stay, and so do optimizers, ties and checkpoints that know them. `te_refusal` says which layers cannot
be converted.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain_precision.errors import PrecisionError

_MODULES = "drivetrain_precision.fp8.te_modules"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What a plain layer cannot express, by the attributes of Transformer Engine's layers.
_PLAIN_LINEAR: Mapping[str, object] = {
    "parallel_mode": None,
    "tp_size": 1,
    "return_bias": False,
    "weight_names": ["weight"],
    "fuse_wgrad_accumulation": False,
    "primary_weights_in_fp8": False,
}
_PLAIN_NORM: Mapping[str, object] = {"zero_centered_gamma": False}
_PLAIN_PAIR: Mapping[str, object] = {
    **_PLAIN_LINEAR,
    **_PLAIN_NORM,
    "normalization": "LayerNorm",
    "return_layernorm_output": False,
}
_Layer = TypeVar("_Layer", bound=nn.Module)


def te_refusal(module: nn.Module) -> str | None:
    """Return why Transformer Engine has no layer for a module, or None if it has one.

    The sizes that a recipe's formats want are a matter of the recipe, and not looked at here.
    """
    if type(module) not in (nn.Linear, nn.LayerNorm):
        return f"is a {type(module).__name__}, neither an nn.Linear nor an nn.LayerNorm"
    if "forward" in vars(module):
        return "has a forward of its own, set on the object"
    if hooks := [name for name, value in vars(module).items() if "hook" in name and value]:
        return f"has hooks ({', '.join(hooks)}), which the new layer would not call"
    if held := {type(each.data).__name__ for each in module.parameters() if type(each.data) is not Tensor}:
        return f"holds a {held.pop()} as a parameter: it is quantised, or divided among ranks already"
    if isinstance(module, nn.LayerNorm):
        absent = [name for name in ("weight", "bias") if getattr(module, name) is None]
        if absent:
            return f"has no {' and no '.join(absent)}, and Transformer Engine's LayerNorm always has both"
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if not dtypes <= set(_DTYPES) or len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        return f"holds {found}: Transformer Engine computes with one of float32, float16 and bfloat16"
    return None


def te_linear_from(linear: nn.Linear) -> nn.Module:
    """Return Transformer Engine's `Linear` around the parameters of a linear layer.

    Args:
        linear: The layer, on any device; it keeps its parameters too.

    Raises:
        PrecisionError: There is none for this layer, as `te_refusal` says, or there is no CUDA device: the library
            then makes none, on any device.
        ImportError: Transformer Engine cannot be imported.
    """
    _check_convertible(linear)
    held = dict(linear.named_parameters(recurse=False))
    made = _products_library().TELinear(
        linear.in_features,
        linear.out_features,
        bias="bias" in held,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    return _linear_moved(_around(made, linear, held), linear)


def linear_from_te(module: nn.Module) -> nn.Linear:
    """Return the plain linear layer around the parameters of Transformer Engine's `Linear`.

    Raises:
        PrecisionError: The module is no such layer, or does what a plain one cannot, such as tensor parallelism.
        ImportError: Transformer Engine cannot be imported.
    """
    layer = _check_plain(module, "Linear", _PLAIN_LINEAR)
    return _linear_around(layer)


def is_te_linear(module: nn.Module) -> bool:
    """Return whether a module is of the class that `te_linear_from` returns, and no layer of a user's own."""
    # The library need not be imported to know that: it was, where there is such a module.
    modules = sys.modules.get(_MODULES)
    return modules is not None and isinstance(module, modules.TELinear)


def te_layer_norm_from(norm: nn.LayerNorm) -> nn.Module:
    """Return Transformer Engine's `LayerNorm` around the parameters of a layer norm.

    Raises:
        PrecisionError: There is none for this layer; the message is that of `te_refusal`.
        ImportError: Transformer Engine cannot be imported.
    """
    _check_convertible(norm)
    made = _library().TELayerNorm(norm.normalized_shape, eps=norm.eps, dtype=norm.weight.dtype, device="meta")
    return _around(made, norm, dict(norm.named_parameters(recurse=False)))


def layer_norm_from_te(module: nn.Module) -> nn.LayerNorm:
    """Return the plain layer norm around the parameters of Transformer Engine's `LayerNorm`.

    Raises:
        PrecisionError: The module is no such layer, or its weight is one less than the factor it multiplies with
            (zero-centred): no plain weight has the same bits.
        ImportError: Transformer Engine cannot be imported.
    """
    layer = _check_plain(module, "LayerNorm", _PLAIN_NORM)
    return _norm_around(layer)


def te_layer_norm_linear_from(norm: nn.LayerNorm, linear: nn.Linear) -> nn.Module:
    """Return Transformer Engine's `LayerNormLinear`, which computes both layers, around their parameters.

    Its parameters are named `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`.

    Args:
        norm: The norm over the last dimension, of `in_features` elements.
        linear: The linear layer, the only reader of the norm's output; the caller knows that it is.

    Raises:
        PrecisionError: One of them cannot be converted, they do not fit together, or there is no CUDA device.
        ImportError: Transformer Engine cannot be imported.
    """
    _check_convertible(norm)
    _check_convertible(linear)
    _check_pair(norm, linear)
    norms = {f"layer_norm_{name}": each for name, each in norm.named_parameters(recurse=False)}
    held = dict(linear.named_parameters(recurse=False))
    made = _products_library().TELayerNormLinear(
        linear.in_features,
        linear.out_features,
        eps=norm.eps,
        bias="bias" in held,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    return _linear_moved(_around(made, linear, {**norms, **held}), linear)


def layer_norm_linear_from_te(module: nn.Module) -> tuple[nn.LayerNorm, nn.Linear]:
    """Return the plain norm and linear layer around the parameters of Transformer Engine's `LayerNormLinear`.

    Raises:
        PrecisionError: The module is no such layer, or does what plain ones cannot.
        ImportError: Transformer Engine cannot be imported.
    """
    layer = _check_plain(module, "LayerNormLinear", _PLAIN_PAIR)
    return _norm_around(layer, prefix="layer_norm_"), _linear_around(layer)


def _library() -> Any:
    """Import the layers, and Transformer Engine with them."""
    return import_module(_MODULES)


def _products_library() -> Any:
    """Import the layers for one with matrix products, which the library makes only beside a CUDA device."""
    library = _library()
    if not torch.cuda.is_available():
        raise PrecisionError(
            "Transformer Engine makes layers with matrix products only where there is a CUDA device; there is none"
        )
    return library


def _check_convertible(module: nn.Module) -> None:
    if (reason := te_refusal(module)) is not None:
        raise PrecisionError(f"the {type(module).__name__} {reason}; leave it as it is")


def _check_pair(norm: nn.LayerNorm, linear: nn.Linear) -> None:
    if norm.normalized_shape != (linear.in_features,):
        raise PrecisionError(
            f"the LayerNorm normalises {norm.normalized_shape}, and the Linear reads {linear.in_features} features: "
            "convert them one by one"
        )
    if norm.weight.dtype != linear.weight.dtype or norm.weight.device != linear.weight.device:
        raise PrecisionError(
            f"the LayerNorm holds {norm.weight.dtype} on {norm.weight.device}, and the Linear {linear.weight.dtype} "
            f"on {linear.weight.device}: one layer holds one dtype on one device; convert them one by one"
        )
    if norm.training != linear.training:
        raise PrecisionError(
            "one of the LayerNorm and the Linear is in training mode: call train() or eval() first"
        )


def _check_plain(module: nn.Module, kind: str, plain: Mapping[str, object]) -> Any:
    """Return a layer of Transformer Engine whose settings a plain layer can express."""
    ours = getattr(_library(), f"TE{kind}")
    if type(module) not in (ours, ours.__base__):
        raise PrecisionError(f"a {type(module).__name__} is not Transformer Engine's {kind}")
    for name, value in plain.items():
        found = getattr(module, name)
        if found != value:
            raise PrecisionError(
                f"the {kind} has {name}={found!r}, which a plain layer does not have; only {name}={value!r} can be "
                "restored"
            )
    return module


def _around(made: _Layer, source: nn.Module, held: Mapping[str, nn.Parameter]) -> _Layer:
    """Put parameters into a layer that was built on the meta device, in the mode of the layer that held them."""
    for name, parameter in held.items():
        setattr(made, name, parameter)
    return made.train(source.training)


def _linear_moved(made: Any, linear: nn.Linear) -> nn.Module:
    """Do what the layer does when its parameters arrive on a device, which is not to be left to a forward."""
    if not made.use_bias:  # it holds an empty tensor in place of a bias, which is on the meta device
        made.bias = linear.weight.new_empty(0)
    return made.to(
        linear.weight.device
    )  # no copy; on CUDA it allocates cuBLAS's workspace outside of any graph


def _linear_around(layer: Any) -> nn.Linear:
    held = {"weight": layer.weight, **({"bias": layer.bias} if layer.use_bias else {})}
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.use_bias, device="meta")
    return _around(made, layer, held)


def _norm_around(layer: Any, *, prefix: str = "") -> nn.LayerNorm:
    weight, bias = getattr(layer, f"{prefix}weight"), getattr(layer, f"{prefix}bias")
    made = nn.LayerNorm(weight.shape, eps=layer.eps, device="meta")
    return _around(made, layer, {"weight": weight, "bias": bias})
