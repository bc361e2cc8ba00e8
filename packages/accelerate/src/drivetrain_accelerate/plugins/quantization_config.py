"""The options of models whose weights bitsandbytes quantises."""

from typing import Any

import torch

from drivetrain_accelerate.plugins.enums import CustomDtype
from drivetrain_accelerate.plugins.option_fields import options

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@options
class BnbQuantizationConfig:
    """Options of quantised weights."""

    load_in_8bit: bool = False
    llm_int8_threshold: Any = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Any = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        """Replace names of dtypes by dtypes; raise a ValueError for a wrong value, which names the field first."""
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError(
                f"load_in_4bit={self.load_in_4bit} and load_in_8bit={self.load_in_8bit}: choose one"
            )
        if not isinstance(self.llm_int8_threshold, int | float):
            raise ValueError(f"llm_int8_threshold={self.llm_int8_threshold!r}: must be a number")
        if (kind := self.bnb_4bit_quant_type) not in ("fp4", "nf4"):
            raise ValueError(f"bnb_4bit_quant_type={kind!r}: must be 'fp4' or 'nf4'")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ValueError(f"{name}={value!r}: must be a list of names of modules")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        self.target_dtype: Any = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)


def _dtype(field: str, value: object) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(f"{field}={value!r}: must be a torch.dtype, or one of {', '.join(_DTYPES)}")
    return _DTYPES[value]
