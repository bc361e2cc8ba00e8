"""The options of training in fp8, by the library that computes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.plugins.known_fields import options
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_ENV = "ACCELERATE_FP8_"


@options
class AORecipeKwargs(KwargsHandler):
    """Options of fp8 by torchao.

    Attributes:
        config: The configuration of torchao's layers; the other two fields make one where it is not given.
        module_filter_func: A function of module and name that returns whether to convert a linear layer.
        pad_inner_dim: Whether sizes that are no multiple of 16 are padded.
        enable_fsdp_float8_all_gather: Whether FSDP2 gathers weights in float8.
    """

    config: "Float8LinearConfig | None" = None
    module_filter_func: Callable[..., Any] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

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
    """Options of fp8 by Transformer Engine; those not given come from the environment.

    Attributes:
        use_autocast_during_eval: Whether evaluation computes in fp8 too.
        margin: The margin of the scales, in powers of 2.
        interval: The interval at which scales were computed in old versions of the library.
        fp8_format: The format of forward and backward.
        amax_history_len: The number of steps whose largest values give the scales.
        amax_compute_algo: Whether the scale is that of the largest or of the latest of these.
        override_linear_precision: The products that are computed in higher precision: forward, gradient of the
            input, gradient of the weight.
        use_mxfp8_block_scaling: Whether to compute in MXFP8.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

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
