"""The fp8 options of Accelerate's files and command line, mapped to `fp8_recipe` of the `precision` section."""

import re
from collections.abc import Mapping
from typing import Any

from drivetrain_accelerate.migration.option_meanings import (
    NO_CHANGE,
    Family,
    Meaning,
    Reader,
    is_set,
    notice,
    one_of,
    only,
    refused,
    set_field,
    spelled,
    switch,
    unless_off,
)

_MSAMP = "MS-AMP is not here; say AO or TE, or --precision-fp8-recipe with the name of a recipe"
_GATHER = (
    "weights are gathered in bf16; in fp8 with Accelerator(fp8_recipe=TorchaoRecipe(all_gather=True)) in code"
)
_PADDING = "rows are padded; layers with a size that 16 does not divide stay in bf16 here"
_TRUE = ("true", "yes", "y", "t", "1", "on")


def _in_code(option: str, value: Any) -> str:
    """Say how code sets an option of delayed scaling, which no setting has."""
    text = spelled(value)
    shown = f"{{{option!r}: {text if text.isdigit() else repr(text)}}}"
    return f"Accelerator(fp8_recipe=TransformerEngineRecipe(scaling='delayed', options={shown})) in code"


def _option(name: str, usual: str) -> Reader:
    """Return the reader of an option of delayed scaling, whose usual value asks for nothing."""
    return lambda value: (
        NO_CHANGE
        if not is_set(value) or spelled(value) == usual
        else refused(f"no setting has it; say {_in_code(name, value)}")
    )


def _override(value: Any) -> Meaning:
    """Read which of the three products, output and gradients of input and weight, are in higher precision."""
    products = [word in _TRUE for word in re.findall(r"\w+", spelled(value))]
    if not any(products):
        return NO_CHANGE
    if products == [False, False, True]:
        return refused(
            "--precision-fp8-recipe torchao_rowwise_with_gw_hp keeps the weight's gradient in 16 bits"
        )
    return refused(
        "no recipe keeps these products in 16 bits; --precision-fp8-exclude keeps whole layers in bf16, and "
        "--precision-fp8-recipe torchao_rowwise_with_gw_hp the weight's gradient"
    )


_READERS: Mapping[str, Reader] = {
    "backend": one_of(
        {
            "AO": set_field("precision", "fp8_recipe", "torchao_tensorwise"),
            "TE": Meaning(
                setting=("precision", "fp8_recipe"),
                value="te_delayed",
                notice="scales come from the largest value of the history (max), not from the most recent as "
                f"Accelerate's by default; for these say {_in_code('amax_compute_algo', 'most_recent')}",
            ),
            "MSAMP": refused(_MSAMP),
        }
    ),
    "margin": _option("margin", "0"),
    "interval": only(
        "1",
        "scales are computed in every step, as Transformer Engine does by now; leave it out, and "
        "--precision-fp8-recipe names the recipe",
    ),
    "format": _option("fp8_format", "hybrid"),
    "amax_history_len": _option("amax_history_len", "1024"),
    "amax_compute_algo": _option("amax_compute_algo", "max"),
    "override_linear_precision": _override,
    "opt_level": unless_off(_MSAMP),
    "enable_fsdp_float8_all_gather": switch(on=notice(_GATHER)),
    "pad_inner_dim": switch(on=notice(_PADDING)),
}
# What a switch says on the command line, where it takes no value, and what files name otherwise than flags do.
_IN_FILES: Mapping[str, Reader] = {
    "use_autocast_during_eval": switch(
        on=NO_CHANGE,
        off=notice("evaluation computes in fp8 too; accelerator.autocast(enabled=False) does not"),
    ),
    "use_mxfp8_block_scaling": switch(
        on=refused("say --precision-fp8-recipe te_mxfp8, and leave the backend out")
    ),
    "amax_history_length": _READERS["amax_history_len"],
    "amax_compute_algorithm": _READERS["amax_compute_algo"],
    "optimization_level": _READERS["opt_level"],
}


def _prefixed(readers: Mapping[str, Reader]) -> dict[str, Reader]:
    return {f"fp8_{word}": reader for word, reader in readers.items()}


FP8 = Family(words=_prefixed(_READERS))
# Accelerate reads the keys of `fp8_config` with and without the prefix of the flags.
FP8_CONFIG = Family(words={**_READERS, **_IN_FILES, **_prefixed({**_READERS, **_IN_FILES})})
