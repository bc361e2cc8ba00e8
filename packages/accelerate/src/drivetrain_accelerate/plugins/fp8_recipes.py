"""The options of training in fp8, by the library that computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from drivetrain_accelerate.plugins.environment_words import integer_from, truth_from, word_from
from drivetrain_accelerate.plugins.known_fields import with_known_fields
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_FORMATS = ("HYBRID", "E4M3", "E5M2")
_AMAX_ALGORITHMS = ("max", "most_recent")


@with_known_fields
@dataclass
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
        """Make the configuration.

        Raises:
            ImportError: torchao is not installed.
        """
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise ImportError(
                "AORecipeKwargs needs torchao: install drivetrain-precision[torchao], or train in bf16"
            ) from error
        if self.config is not None:
            return
        if self.pad_inner_dim is None:
            self.pad_inner_dim = truth_from("ACCELERATE_FP8_PAD_INNER_DIM", default=True)
        if self.enable_fsdp_float8_all_gather is None:
            variable = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"
            self.enable_fsdp_float8_all_gather = truth_from(variable, default=True)
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@with_known_fields
@dataclass
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
        """Fill the fields.

        Raises:
            ValueError: A word is unknown.
        """
        prefix = "ACCELERATE_FP8"
        if self.use_autocast_during_eval is None:
            self.use_autocast_during_eval = truth_from(f"{prefix}_USE_AUTOCAST_DURING_EVAL")
        if self.margin is None:
            self.margin = integer_from(f"{prefix}_MARGIN", 0)
        if self.interval is None:
            self.interval = integer_from(f"{prefix}_INTERVAL", 1)
        form = (self.fp8_format or word_from(f"{prefix}_FORMAT", "HYBRID")).upper()
        self.fp8_format = cast("Any", _one_of("fp8_format", form, _FORMATS))
        algorithm = self.amax_compute_algo or word_from(f"{prefix}_AMAX_COMPUTE_ALGO", "most_recent")
        self.amax_compute_algo = cast("Any", _one_of("amax_compute_algo", algorithm, _AMAX_ALGORITHMS))
        if self.amax_history_len is None:
            self.amax_history_len = integer_from(f"{prefix}_AMAX_HISTORY_LEN", 1024)
        if self.override_linear_precision is None:
            forward, data, weight = (
                truth_from(f"{prefix}_OVERRIDE_{name}") for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = (forward, data, weight)
        if self.use_mxfp8_block_scaling is None:
            self.use_mxfp8_block_scaling = truth_from(f"{prefix}_USE_MXFP8_BLOCK_SCALING")


@with_known_fields
@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 by MS-AMP, which drivetrain does not train with."""

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        """Fill the level.

        Raises:
            ValueError: The level is unknown.
        """
        level = self.opt_level or word_from("ACCELERATE_FP8_OPT_LEVEL", "O2")
        self.opt_level = cast("Any", _one_of("opt_level", level, ("O1", "O2")))


@with_known_fields
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Options of fp8 from before there was a class for each library."""

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        """Fill the fields of the library's own options.

        Raises:
            ValueError: The library is unknown, or one of the fields.
        """
        # Accelerate takes MS-AMP if neither is said, and then fails where it is not installed.
        library = (self.backend or word_from("ACCELERATE_FP8_BACKEND", "TE")).upper()
        self.backend = cast("Any", _one_of("backend", library, ("MSAMP", "TE")))
        TERecipeKwargs.__post_init__(self)
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{field}={value!r}: `{field}` must be one of {' or '.join(allowed)}")
    return value
