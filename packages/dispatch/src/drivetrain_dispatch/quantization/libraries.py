"""Pack weights with bitsandbytes in 8 and 4 bits, or with torchao's configurations."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drivetrain_dispatch.arguments import check_dtype
from drivetrain_dispatch.model.quantized_tensor import is_quantized, size_in_bytes

_BLOCK, _BLOCK_OF_SCALES = 64, 256  # in bitsandbytes: 4-bit weights per scale, and 8-bit scales per scale
_TABLE_OF_4_BITS, _TABLE_OF_8_BITS = 16 * 4, 256 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsAndBytes8Bit:
    """The 8-bit quantisation of bitsandbytes with a scale per row (LLM.int8()).

    Attributes:
        threshold: The magnitude above which a column of the input is computed in 16 bits; 0 for no such columns.
        skip_modules: The names of modules that are not quantised; None for `lm_head` only.
    """

    threshold: float = 6.0
    skip_modules: Collection[str] | None = None

    def __post_init__(self) -> None:
        _check_installed("bitsandbytes", "BitsAndBytes8Bit")
        threshold: Any = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 0:
            raise ValueError(f"threshold={threshold!r}: must be a number, 0 or more")

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of a packed weight of this shape and original dtype."""
        del dtype
        return math.prod(shape) + 4 * shape[0]

    def pack(self, weight: Tensor) -> nn.Parameter:
        """Return the packed weight, on the device of the weight."""
        values, scales, _ = _bitsandbytes().functional.int8_vectorwise_quant(weight.to(torch.float16))
        return _bitsandbytes().nn.Int8Params(
            values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales
        )

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        """Return the layer of bitsandbytes that replaces `linear`."""
        new = _bitsandbytes().nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=self.threshold,
            device="meta",
        )
        return _replace_linear(linear, new, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsAndBytes4Bit:
    """The 4-bit quantisation of bitsandbytes with a scale per 64 weights (as in QLoRA).

    Attributes:
        quant_type: The 4-bit data type: "nf4" for normally distributed weights, or "fp4".
        double_quant: Whether the scales are quantised too.
        compute_dtype: The dtype that layers compute in; None for the original dtype of the weight.
        skip_modules: The names of modules that are not quantised; None for `lm_head` only.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = False
    compute_dtype: torch.dtype | None = None
    skip_modules: Collection[str] | None = None

    def __post_init__(self) -> None:
        _check_installed("bitsandbytes", "BitsAndBytes4Bit")
        if self.quant_type not in ("nf4", "fp4"):
            raise ValueError(f"quant_type={self.quant_type!r}: must be 'nf4' or 'fp4'")
        if self.compute_dtype is not None:
            check_dtype("compute_dtype", self.compute_dtype)

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of a packed weight of this shape and original dtype."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"BitsAndBytes4Bit packs weights of fp32, fp16 and bf16, not of {dtype}: give dtype=..."
            )
        numel = math.prod(shape)
        values, scales = -(-numel // 2), -(-numel // _BLOCK)
        if not self.double_quant:
            return values + 4 * scales + _TABLE_OF_4_BITS
        of_scales = 4 * -(-scales // _BLOCK_OF_SCALES) + _TABLE_OF_8_BITS + 4  # 4 bytes for their mean
        return values + scales + of_scales + _TABLE_OF_4_BITS

    def pack(self, weight: Tensor) -> nn.Parameter:
        """Return the packed weight, on the device of the weight."""
        values, state = _bitsandbytes().functional.quantize_4bit(
            weight.contiguous(),
            blocksize=_BLOCK,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
        )
        return _bitsandbytes().nn.Params4bit(
            values,
            requires_grad=False,
            quant_state=state,
            blocksize=_BLOCK,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
            bnb_quantized=True,
        )

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        """Return the layer of bitsandbytes that replaces `linear`."""
        packed: Any = weight
        new = _bitsandbytes().nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=self.compute_dtype or packed.quant_state.dtype,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
            device="meta",
        )
        packed.module, new.quant_state = new, packed.quant_state
        return _replace_linear(linear, new, weight)


@dataclass(frozen=True, slots=True)
class TorchAO:
    """A quantisation by a weight-only configuration of torchao.

    Args:
        config: The configuration, such as `torchao.quantization.Int8WeightOnlyConfig()`, `Int4WeightOnlyConfig()` or
            `Float8WeightOnlyConfig()`.
        skip_modules: The names of modules that are not quantised; None for `lm_head` only.
    """

    config: Any
    skip_modules: Collection[str] | None = None

    def __post_init__(self) -> None:
        _check_installed("torchao", "TorchAO")
        if isinstance(self.config, str | type) or not type(self.config).__module__.startswith("torchao"):
            raise ValueError(
                f"config={self.config!r}: must be a configuration of torchao, such as "
                "torchao.quantization.Int8WeightOnlyConfig()"
            )

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of a packed weight of this shape and original dtype."""
        return size_in_bytes(self.pack(torch.empty(shape, dtype=dtype, device="meta")))

    def pack(self, weight: Tensor) -> nn.Parameter:
        """Return the packed weight, on the device of the weight; a ValueError if torchao cannot pack it."""
        from torchao.quantization import quantize_

        shape = tuple(weight.shape)
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        try:
            quantize_(linear, self.config)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError, ImportError) as error:
            raise ValueError(
                f"torchao cannot pack a weight of {shape} on {weight.device} by {self.config} ({error}): use another "
                "configuration or device, or name its module in skip_modules"
            ) from error
        if not is_quantized(linear.weight):
            raise ValueError(
                f"torchao leaves a weight of {shape} as it is, by {self.config}: its sizes must be multiples of the "
                "group's; use another group_size, or name its module in skip_modules"
            )
        return linear.weight

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        """Return None, since `nn.Linear` computes with torchao's weights."""
        del linear, weight
        return None


def _replace_linear(linear: nn.Linear, new: nn.Linear, weight: nn.Parameter) -> nn.Module:
    new.weight, new.bias = weight, linear.bias
    return new.train(linear.training)


def _check_installed(library: str, what: str) -> None:
    if find_spec(library) is None:
        raise ImportError(f"{what} packs weights by {library}: pip install 'drivetrain-dispatch[{library}]'")


def _bitsandbytes() -> Any:
    import bitsandbytes

    return bitsandbytes
