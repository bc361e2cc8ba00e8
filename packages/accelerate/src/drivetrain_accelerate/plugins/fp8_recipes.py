"""The options of training in fp8, by the library that computes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler
from drivetrain_accelerate.plugins.option_fields import becomes, options, without_effect

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_ENV = "ACCELERATE_FP8_"
_TE_OPTION = "TransformerEngineRecipe(options=)"


@options
class AORecipeKwargs(KwargsHandler):
    """Options of fp8 by torchao."""

    config: "Float8LinearConfig | None" = becomes(
        "TorchaoRecipe(scaling=, round_scales=, all_gather=)", default=None
    )
    module_filter_func: Callable[..., Any] | None = becomes("LayerFilter(accept=)", default=None)
    pad_inner_dim: bool | None = without_effect(
        "layers whose sizes are no multiple of 16 stay in bf16, as by Accelerate's own filter", default=None
    )
    enable_fsdp_float8_all_gather: bool | None = becomes("TorchaoRecipe(all_gather=)", default=None)

    def __post_init__(self) -> None:
        """Make the configuration; raise an ImportError without torchao."""
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise ImportError(
                "AORecipeKwargs needs torchao: install drivetrain-precision[torchao], or train in bf16"
            ) from error
        if self.config is not None:
            return
        fill_unsaid(self, _ENV, pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
        chosen: Any = self  # its two truth values are filled
        self.config = Float8LinearConfig(
            pad_inner_dim=chosen.pad_inner_dim,
            enable_fsdp_float8_all_gather=chosen.enable_fsdp_float8_all_gather,
        )


@options
class TERecipeKwargs(KwargsHandler):
    """Options of fp8 by Transformer Engine; those not given come from the environment."""

    use_autocast_during_eval: bool | None = without_effect(
        "evaluation computes in the same formats as training", default=None
    )
    margin: int | None = becomes(_TE_OPTION, default=None)
    interval: int | None = without_effect(
        "Transformer Engine computes scales in every step, and ignores it", default=None
    )
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = becomes(_TE_OPTION, default=None)
    amax_history_len: int | None = becomes(_TE_OPTION, default=None)
    amax_compute_algo: Literal["max", "most_recent"] | None = becomes(_TE_OPTION, default=None)
    override_linear_precision: tuple[bool, bool, bool] | None = becomes(_TE_OPTION, default=None)
    use_mxfp8_block_scaling: bool | None = becomes("TransformerEngineRecipe(scaling='mxfp8')", default=None)

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for an unknown word."""
        fill_unsaid(
            self,
            _ENV,
            use_autocast_during_eval=False,
            margin=0,
            interval=1,
            amax_history_len=1024,
            amax_compute_algo="most_recent",
            use_mxfp8_block_scaling=False,
        )
        fill_unsaid(self, "ACCELERATE_", fp8_format="HYBRID")
        in_capitals: Any = str(self.fp8_format).upper()
        self.fp8_format = in_capitals
        _check_one_of(self, "fp8_format", "HYBRID", "E4M3", "E5M2")
        _check_one_of(self, "amax_compute_algo", "max", "most_recent")
        if self.override_linear_precision is None:
            forward, data, weight = (
                value_from(f"{_ENV}OVERRIDE_{name}", False) for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = (forward, data, weight)


@options
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 by MS-AMP, which drivetrain does not train with."""

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        """Fill the level; raise a ValueError for an unknown one."""
        fill_unsaid(self, _ENV, opt_level="O2")
        _check_one_of(self, "opt_level", "O1", "O2")


@options
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Options of fp8 from before there was a class for each library."""

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        """Fill the fields of the library's own options; raise a ValueError for an unknown word."""
        # Accelerate takes MS-AMP if neither is said, and then fails where it is not installed.
        fill_unsaid(self, _ENV, backend="TE")
        in_capitals: Any = str(self.backend).upper()
        self.backend = in_capitals
        _check_one_of(self, "backend", "MSAMP", "TE")
        TERecipeKwargs.__post_init__(self)
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)


def _check_one_of(options: object, field: str, *allowed: str) -> None:
    if (value := getattr(options, field)) not in allowed:
        raise ValueError(f"{field}={value!r}: `{field}` must be one of {' or '.join(allowed)}")
