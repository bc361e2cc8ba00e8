"""The options of Megatron-LM, which drivetrain does not train by yet: they can be held, not used."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from drivetrain_accelerate.errors import NotProvidedError
from drivetrain_accelerate.plugins.environment_words import integer_from, number_from, truth_from, word_from
from drivetrain_accelerate.plugins.known_fields import with_known_fields
from drivetrain_config import environ

INSTEAD = (
    "drivetrain has no Megatron backend yet; train by FSDP (FullyShardedDataParallelPlugin(fsdp_version=2)), which "
    "shards models of the same sizes"
)
_ENV = "MEGATRON_LM"
_SWITCHES = MappingProxyType(
    {
        **dict.fromkeys(("use_custom_fsdp", "no_load_optim", "eod_mask_loss", "no_save_optim"), False),
        **dict.fromkeys(("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), False),
        **dict.fromkeys(("use_precision_aware_optimizer", "recompute_activations"), False),
        **dict.fromkeys(("use_distributed_optimizer", "sequence_parallelism"), False),
        **dict.fromkeys(("attention_backend", "attention_softmax_in_fp32"), True),
        **dict.fromkeys(("calculate_per_token_loss", "use_rotary_position_embeddings"), True),
    }
)
_COUNTS = MappingProxyType(
    {
        **dict.fromkeys(("tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers"), 1),
        **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
        "context_parallel_size": 2,
    }
)
_NUMBERS = MappingProxyType({"gradient_clipping": 1.0, "attention_dropout": 0.0, "hidden_dropout": 0.0})
_WORDS = MappingProxyType({"recompute_granularity": "full", "recompute_method": "uniform"})
# Megatron's names of the fields that it calls otherwise, and of those that it calls the same.
_RENAMED = MappingProxyType(
    {
        "tp_degree": "tensor_model_parallel_size",
        "pp_degree": "pipeline_model_parallel_size",
        "sequence_parallelism": "sequence_parallel",
        "gradient_clipping": "clip_grad",
    }
)
_SAME = (
    *(
        "pipeline_model_parallel_split_rank",
        "num_layers_per_virtual_pipeline_stage",
        "use_distributed_optimizer",
    ),
    *("num_micro_batches", "consumed_samples", "no_wd_decay_cond", "scale_lr_cond", "lr_mult"),
    *("megatron_dataset_flag", "eval_iters", "eval_interval", "use_custom_fsdp", "no_load_optim"),
    *("eod_mask_loss", "no_save_optim", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
    *("use_precision_aware_optimizer", "decoder_last_pipeline_num_layers", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers", "attention_backend", "expert_model_parallel_size"),
    *("context_parallel_size", "attention_dropout", "hidden_dropout", "attention_softmax_in_fp32"),
    *("expert_tensor_parallel_size", "calculate_per_token_loss", "use_rotary_position_embeddings"),
)


@with_known_fields
@dataclass
class MegatronLMPlugin:
    """Options of Megatron-LM, by its own names; those not given come from the environment.

    Its methods, which prepare a run by Megatron, raise an error.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Fill the fields."""
        for name, default in _SWITCHES.items():
            self._fill(name, lambda variable, default=default: truth_from(variable, default=default))
        for name, default in _COUNTS.items():
            self._fill(name, lambda variable, default=default: integer_from(variable, default))
        for name, default in _NUMBERS.items():
            self._fill(name, lambda variable, default=default: number_from(variable, default))
        for name, default in _WORDS.items():
            self._fill(name, lambda variable, default=default: word_from(variable, default))
        if environ.read(f"{_ENV}_DECODER_LAST_PIPELINE_NUM_LAYERS") is not None:
            self._fill("decoder_last_pipeline_num_layers", lambda variable: integer_from(variable, 0))
        is_plain = self.pp_degree == 1 and not self.use_distributed_optimizer
        self.DDP_impl = "torch" if is_plain else "local"
        self.megatron_lm_default_args: dict[str, Any] = {
            **{theirs: getattr(self, name) for name, theirs in _RENAMED.items()},
            "DDP_impl": self.DDP_impl,
            **{name: getattr(self, name) for name in _SAME},
            **({} if self.tensorboard_dir is None else {"tensorboard_dir": self.tensorboard_dir}),
            **(self.other_megatron_args or {}),
        }

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        del model, batch_data
        _refuse("set_network_size_args")

    def set_mixed_precision(self, mixed_precision: str) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        del mixed_precision
        _refuse("set_mixed_precision")

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        del micro_batch_size, dp_degree
        _refuse("set_training_args")

    def set_optimizer_type(self, optimizer: Any) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        del optimizer
        _refuse("set_optimizer_type")

    def set_scheduler_args(self, scheduler: Any) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        del scheduler
        _refuse("set_scheduler_args")

    def set_tensorboard_logging_options(self) -> NoReturn:
        """Raise an error; see `NotProvidedError`."""
        _refuse("set_tensorboard_logging_options")

    def _fill(self, name: str, read: Callable[[str], Any]) -> None:
        if getattr(self, name) is None:
            setattr(self, name, read(f"{_ENV}_{name.upper()}"))


def _refuse(name: str) -> NoReturn:
    raise NotProvidedError(f"MegatronLMPlugin.{name}: {INSTEAD}")
