"""Conversions of torch's layers to layers of Transformer Engine, and back, around the same parameters.

A new layer is built without memory and takes over the old layer's parameters. Their values, dtype, device and
`requires_grad` stay; their optimizers, ties and checkpoints stay valid. `te_refusal` says why a layer cannot be
converted.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain_precision.errors import PrecisionError

_MODULES = "drivetrain_precision.fp8.te_modules"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Layer = TypeVar("_Layer", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of layer that both libraries have under the same name."""

    plain: type[nn.Module]
    arguments: Callable[[Any], dict[str, Any]]  # of both constructors, read off a layer of either library
    dtype: str  # the name of that argument in Transformer Engine's
    needed: tuple[str, ...]  # the parameters that Transformer Engine's layer always has
    plain_values: Mapping[str, object]  # what a plain layer can express of the other's attributes

    @property
    def name(self) -> str:
        """The name of the class in both libraries."""
        return self.plain.__name__


_LINEAR = _Kind(
    plain=nn.Linear,
    arguments=lambda layer: {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        # Without a bias, torch holds None, and Transformer Engine an empty tensor.
        "bias": isinstance(layer.bias, nn.Parameter),
    },
    dtype="params_dtype",
    needed=("weight",),
    plain_values={
        "parallel_mode": None,
        "tp_size": 1,
        "return_bias": False,
        "weight_names": ["weight"],
        "fuse_wgrad_accumulation": False,
        "primary_weights_in_fp8": False,
    },
)
_NORMS = tuple(
    _Kind(
        plain=plain,
        arguments=lambda layer: {"normalized_shape": layer.weight.shape, "eps": layer.eps},
        dtype="dtype",
        needed=needed,
        plain_values={"zero_centered_gamma": False},
    )
    for plain, needed in ((nn.LayerNorm, ("weight", "bias")), (nn.RMSNorm, ("weight",)))
)
_KINDS = (_LINEAR, *_NORMS)


def te_refusal(module: nn.Module) -> str | None:
    """Return why Transformer Engine has no layer for a module, whatever the recipe, or None if it has one."""
    kind = next((each for each in _KINDS if type(module) is each.plain), None)
    if kind is None:
        return f"is a {type(module).__name__}, none of {', '.join(each.name for each in _KINDS)} of torch.nn"
    if "forward" in vars(module):
        return "has a forward of its own, set on the object"
    if hooks := [name for name, value in vars(module).items() if "hook" in name and value]:
        return f"has hooks ({', '.join(hooks)}), which the new layer would not call"
    if held := {type(each.data).__name__ for each in module.parameters() if type(each.data) is not Tensor}:
        return f"holds a {held.pop()} as a parameter: it is quantised, or divided among ranks already"
    if absent := [name for name in kind.needed if getattr(module, name) is None]:
        return f"has no {' and no '.join(absent)}, which Transformer Engine's {kind.name} always has"
    if getattr(module, "eps", 0.0) is None:
        return "has eps=None, which is another number for each dtype; Transformer Engine has one, such as eps=1e-6"
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if not dtypes <= set(_DTYPES) or len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        return f"holds {found}: Transformer Engine computes with one of float32, float16 and bfloat16"
    return None


def fusion_refusal(norm: nn.Module, linear: nn.Linear) -> str | None:
    """Return why one layer cannot compute both a norm and a linear layer; None if it can. Both are convertible."""
    weight: Any = norm.weight
    if tuple(weight.shape) != (linear.in_features,):
        return (
            f"it normalises {tuple(weight.shape)}, and the linear layer reads {linear.in_features} features"
        )
    if weight.dtype != linear.weight.dtype or weight.device != linear.weight.device:
        return (
            f"it holds {weight.dtype} on {weight.device}, and the linear layer {linear.weight.dtype} on "
            f"{linear.weight.device}"
        )
    return "it or the linear layer alone is in training mode" if norm.training != linear.training else None


def to_te(module: nn.Module) -> nn.Module:
    """Return Transformer Engine's layer around the parameters of a plain layer, which keeps them too.

    PrecisionError if `te_refusal` refuses the layer, or if a layer with products has no CUDA device.
    """
    if (reason := te_refusal(module)) is not None:
        raise PrecisionError(f"the {type(module).__name__} {reason}; leave it as it is")
    kind = next(each for each in _KINDS if type(module) is each.plain)
    return _build(f"TE{kind.name}", kind, module)


def fuse(norm: nn.Module, linear: nn.Linear) -> nn.Module:
    """Return Transformer Engine's layer that computes a norm and a linear layer, around their parameters.

    `to_te` must have returned the norm, and the linear layer must be its only reader. The norm keeps its parameters
    and becomes the identity; the new layer computes with these parameters.
    """
    if (reason := te_refusal(linear)) is not None:
        raise PrecisionError(f"the Linear {reason}; leave it as it is")
    before: Any = norm
    kind = _kind_of(norm).name
    made = _build("LayerNormLinear", _LINEAR, linear, norm=norm, eps=before.eps, normalization=kind)
    before.is_computed_by_next = True
    return made


def from_te(module: nn.Module) -> nn.Module:
    """Return the plain layer around the parameters of Transformer Engine's; for a fused layer, the linear layer.

    PrecisionError if the layer has an option that a plain layer lacks, such as tensor parallelism or a norm's weight
    stored less 1, which no plain weight can represent exactly.
    """
    kind = _kind_of(module)
    for name, value in kind.plain_values.items():
        found = getattr(module, name)
        if found != value:
            raise PrecisionError(
                f"the {kind.name} has {name}={found!r}, which a plain layer does not have; only {name}={value!r} can "
                "be restored"
            )
    return _take_parameters(kind.plain(**kind.arguments(module), device="meta"), module)


def is_te_linear(module: nn.Module) -> bool:
    """Return whether `to_te` or `fuse` made a module and it multiplies matrices; False for a user's own layer."""
    return _is_ours(module, "TELinear", "TENormLinear")


def is_te_layer(module: nn.Module) -> bool:
    """Return whether `to_te` or `fuse` made a module; False for a user's own layer."""
    return _is_ours(module, "TENormLinear", *(f"TE{each.name}" for each in _KINDS))


def _is_ours(module: nn.Module, *names: str) -> bool:
    # The library need not be imported to know that: it was, where there is such a module.
    modules = sys.modules.get(_MODULES)
    return modules is not None and isinstance(module, tuple(getattr(modules, name) for name in names))


def _kind_of(module: nn.Module) -> _Kind:
    """Return the kind of a layer made by `to_te`, `fuse` or the library itself."""
    library: Any = import_module(_MODULES)
    if type(module) is library.TENormLinear:
        return _LINEAR
    for kind in _KINDS:
        ours = getattr(library, f"TE{kind.name}")
        if type(module) in (ours, ours.__bases__[-1]):
            return kind
    raise PrecisionError(
        f"a {type(module).__name__} is none of Transformer Engine's {', '.join(each.name for each in _KINDS)}"
    )


def _build(
    name: str, kind: _Kind, source: nn.Module, *, norm: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Return a layer of Transformer Engine around the parameters of a plain layer and, if given, of a norm."""
    library: Any = import_module(_MODULES)
    weight = source.get_parameter("weight")
    if kind is _LINEAR and not torch.cuda.is_available():
        raise PrecisionError(
            "Transformer Engine makes layers with matrix products only where there is a CUDA device; there is none"
        )
    dtype = {kind.dtype: weight.dtype}
    made = getattr(library, name)(**kind.arguments(source), **dtype, **options, device="meta")
    _take_parameters(made, source)
    if norm is not None:
        library.take_norm(made, norm)
    if kind is not _LINEAR:
        return made
    if not made.use_bias:  # it holds an empty tensor in place of a bias, which is on the meta device
        made.bias = weight.new_empty(0)
    return made.to(weight.device)  # no copy; on CUDA it allocates cuBLAS's workspace outside of any graph


def _take_parameters(made: _Layer, source: nn.Module) -> _Layer:
    """Put a layer's parameters and training mode into a layer that was built on the meta device."""
    for name, parameter in source.named_parameters(recurse=False):
        setattr(made, name, parameter)
    return made.train(source.training)
