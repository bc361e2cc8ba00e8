"""The options of FSDP, and torch's objects for the words that the options accept."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from logging import getLogger
from typing import Any, cast
from warnings import warn

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from drivetrain_accelerate.environment_variables import fill_unsaid, truth, value_from
from drivetrain_accelerate.model_structure import get_module_class_from_name
from drivetrain_accelerate.plugins.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from drivetrain_accelerate.plugins.option_fields import becomes, options, refused, without_effect
from drivetrain_config import environ
from drivetrain_state import RankLogger

_logger = RankLogger(getLogger(__name__))
_ENV = "FSDP_"
# The words of fields, with what of torch's each means.
STRATEGIES = dict(zip(FSDP_SHARDING_STRATEGY, ShardingStrategy, strict=True))
_PREFETCHES = dict(zip(FSDP_BACKWARD_PREFETCH, (*BackwardPrefetch, None), strict=True))
_POLICIES = (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None)
_WRAP_POLICIES = dict(zip(FSDP_AUTO_WRAP_POLICY, _POLICIES, strict=True))
_STATE_DICT_TYPES = {word: StateDictType[word] for word in FSDP_STATE_DICT_TYPE}
# For each form of state dicts, the classes of its options for models and optimizers, and Accelerate's values.
_STATE_DICT_OPTIONS: dict[StateDictType, tuple[Any, Any, dict[str, bool]]] = {
    StateDictType.FULL_STATE_DICT: (
        FullStateDictConfig,
        FullOptimStateDictConfig,
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    StateDictType.SHARDED_STATE_DICT: (
        ShardedStateDictConfig,
        ShardedOptimStateDictConfig,
        {"offload_to_cpu": True},
    ),
}


_MODES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_FIELDS = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}


@options
class FullyShardedDataParallelPlugin:
    """Options of FSDP. Options that are not given come from the environment.

    `fsdp_version` chooses the form of the fields: 1 as torch's first FSDP, 2 as `fully_shard`. FSDP2 runs both.
    """

    fsdp_version: Any = without_effect(
        "FSDP2 runs either version's options, with the same results", default=None
    )
    sharding_strategy: Any = becomes("fsdp.strategy", default=None)
    reshard_after_forward: Any = becomes("fsdp.strategy", default=None)
    backward_prefetch: "str | BackwardPrefetch | None" = refused(
        "fsdp.prefetch",
        "FSDP2 gathers the next block before this one's gradients are computed, or none; leave it out",
        default=None,
    )
    mixed_precision_policy: "dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None" = becomes(
        "run.mixed_precision, precision.reduce_dtype, .buffer_dtype, .output_dtype", default=None
    )
    auto_wrap_policy: Callable[..., Any] | str | None = becomes(
        "fsdp.wrap or fsdp.min_num_params", default=None
    )
    cpu_offload: "bool | CPUOffload | OffloadPolicy | None" = becomes(
        "fsdp.offload, fsdp.pin_memory", default=None
    )
    ignored_modules: Iterable[nn.Module] | str | None = refused(
        "backend fsdp",
        "every parameter of a prepared model is sharded; leave these modules out of the model, or leave it out",
        default=None,
    )
    state_dict_type: Any = without_effect(
        "saves hold whole tensors by name, which load on any number of ranks", default=None
    )
    state_dict_config: "FullStateDictConfig | ShardedStateDictConfig | None" = without_effect(
        "as state_dict_type", default=None
    )
    optim_state_dict_config: "FullOptimStateDictConfig | ShardedOptimStateDictConfig | None" = without_effect(
        "as state_dict_type", default=None
    )
    limit_all_gathers: bool = without_effect("FSDP2 always limits how much is gathered ahead", default=True)
    use_orig_params: bool | None = without_effect(
        "FSDP2 always keeps the model's own parameters", default=None
    )
    param_init_fn: Callable[[nn.Module], None] | None = refused(
        "building()",
        "models on meta get rank 0's values, or those of reset_parameters(); leave it out",
        default=None,
    )
    sync_module_states: bool | None = without_effect(
        "all ranks always start from rank 0's values", default=None
    )
    forward_prefetch: bool | None = becomes("fsdp.prefetch", default=None)
    activation_checkpointing: bool | None = becomes("model.activation_checkpointing", default=None)
    activation_checkpointing_offload: bool | None = refused(
        "model.activation_checkpointing",
        "activations are not offloaded; activation_checkpointing=True alone saves most",
        default=None,
    )
    cpu_ram_efficient_loading: bool | None = without_effect(
        "transformers reads it while it loads; ranks with models on meta are filled from rank 0 in any case",
        default=None,
    )
    transformer_cls_names_to_wrap: list[str] | None = becomes("fsdp.wrap", default=None)
    min_num_params: Any = becomes("fsdp.min_num_params", default=None)

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for an unknown word, or a field of the other version."""
        version = value_from(f"{_ENV}VERSION", "1") if self.fsdp_version is None else self.fsdp_version
        if str(version) not in ("1", "2"):
            raise ValueError(f"fsdp_version={version!r}: must be 1 or 2")
        self.fsdp_version = int(str(version))
        (self._read_first_version if self.fsdp_version == 1 else self._read_second_version)()
        if self.cpu_offload is None:
            self.cpu_offload = value_from(f"{_ENV}OFFLOAD_PARAMS", False)
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._read_wrap_policy()
        self.set_state_dict_type()
        self._read_truths(
            "activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"
        )
        if self.activation_checkpointing_offload:
            for name, needed in (("activation_checkpointing", True), ("fsdp_version", 2)):
                if getattr(self, name) != needed:
                    raise ValueError(f"`activation_checkpointing_offload=True` requires `{name}={needed}`.")
        if self.ignored_modules is None:
            self.ignored_modules = environ.read(f"{_ENV}IGNORED_MODULES")
        if isinstance(self.mixed_precision_policy, str | dict):
            self.mixed_precision_policy = mixed_precision_of(self.mixed_precision_policy, self.fsdp_version)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        if self.fsdp_version == 1:
            if self.cpu_ram_efficient_loading and not self.sync_module_states:
                warn(
                    "sync_module_states cannot be False with cpu_ram_efficient_loading: it is set to True",
                    stacklevel=3,
                )
                self.sync_module_states = True
            if self.sync_module_states and self.param_init_fn is None:
                self.param_init_fn = allocate_empty
        # transformers reads it while it loads a model.
        environ.put(FSDP_CPU_RAM_EFFICIENT_LOADING=str(self.cpu_ram_efficient_loading))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the type of state dicts, given by name or as torch's enum, and its options unless options are set.

        None keeps the field's type, or takes the default of the FSDP version. ValueError if the type is unknown, or
        of another version.
        """
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        given = self.state_dict_type if state_dict_type is None else state_dict_type
        given = value_from(f"{_ENV}STATE_DICT_TYPE", default) if given is None else given
        self.state_dict_type = meant_by(given, _STATE_DICT_TYPES, "state_dict_type")
        if self.state_dict_type in _STATE_DICT_OPTIONS:
            of_models, of_optimizers, values = _STATE_DICT_OPTIONS[self.state_dict_type]
            self.state_dict_config = self.state_dict_config or of_models(**values)
            self.optim_state_dict_config = self.optim_state_dict_config or of_optimizers(**values)
        elif self.fsdp_version == 2:
            raise ValueError(
                "state_dict_type='LOCAL_STATE_DICT': FSDP2 has no such form; say SHARDED_STATE_DICT or "
                "FULL_STATE_DICT"
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Adapt the policy to this model; raise a ValueError if the model lacks a named class."""
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or [])
            classes: set[type[nn.Module]] = set()
            for name in self.transformer_cls_names_to_wrap:
                if (kind := get_module_class_from_name(model, name)) is None:
                    raise ValueError(
                        f"transformer_cls_names_to_wrap: no module of {type(model).__name__} "
                        f"has the class {name!r}"
                    )
                classes.add(kind)
            self.auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            least = self.min_num_params
            self.auto_wrap_policy = (
                partial(size_based_auto_wrap_policy, min_num_params=least) if least else None
            )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the policy to one dtype, given as a dtype or mode ("fp8" means bf16); keep a policy unless `override`.

        With `buffer_autocast` in version 1, buffers stay in fp32. An unknown mode raises a ValueError.
        """
        if isinstance(self.mixed_precision_policy, dict):
            self.mixed_precision_policy = mixed_precision_of(self.mixed_precision_policy, self.fsdp_version)
        made = mixed_precision_of(
            mixed_precision, self.fsdp_version, buffer=torch.float32 if buffer_autocast else None
        )
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = made

    def validate_mixed_precision_policy(self) -> None:
        """Raise a ValueError if the policy is not of the class that this version takes."""
        self._check_class("mixed_precision_policy", MixedPrecision, MixedPrecisionPolicy)

    def set_cpu_offload(self) -> None:
        """Replace a bool in `cpu_offload` by an object of this version's class."""
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 1:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
            else:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise a ValueError if `cpu_offload` is not of the class that this version takes."""
        self._check_class("cpu_offload", CPUOffload, OffloadPolicy, instead="True, False or ")

    def _check_class(self, field: str, first: type, second: type, instead: str = "") -> None:
        value, needed = getattr(self, field), first if self.fsdp_version == 1 else second
        if not isinstance(value, needed):
            raise ValueError(
                f"{field}={value!r}: fsdp_version={self.fsdp_version} takes {instead}a {needed.__name__} of "
                "torch.distributed.fsdp"
            )

    def _read_first_version(self) -> None:
        if self.sharding_strategy is not None:
            _logger.warning("sharding_strategy is the word of old versions for reshard_after_forward")
        if isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward}: with fsdp_version=1 it must be a sharding "
                "strategy, such as 'FULL_SHARD'; a bool is for fsdp_version=2"
            )
        fill_unsaid(self, _ENV, sharding_strategy="FULL_SHARD")
        for name in ("sharding_strategy", "reshard_after_forward"):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, meant_by(given, STRATEGIES, name))
        if self.backward_prefetch is None:
            self.backward_prefetch = environ.read(f"{_ENV}BACKWARD_PREFETCH")
        self.backward_prefetch = meant_by(self.backward_prefetch, _PREFETCHES, "backward_prefetch")
        self._read_truths("use_orig_params", "sync_module_states", "forward_prefetch")

    def _read_second_version(self) -> None:
        if self.reshard_after_forward is None and self.sharding_strategy is not None:
            raise ValueError(
                f"sharding_strategy={self.sharding_strategy!r}: with fsdp_version=2 say "
                "reshard_after_forward=True (as FULL_SHARD) or False (as SHARD_GRAD_OP)"
            )
        fill_unsaid(self, _ENV, reshard_after_forward=True)
        if isinstance(self.reshard_after_forward, str):
            self.reshard_after_forward = truth(self.reshard_after_forward, of="reshard_after_forward")
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward!r}: with fsdp_version=2 it must be a bool"
            )
        if meant_by(self.backward_prefetch, _PREFETCHES, "backward_prefetch") is not None:
            _logger.warning("backward_prefetch is not of fsdp_version=2, which decides by itself")
        self.backward_prefetch = None
        for name in ("use_orig_params", "sync_module_states"):
            if getattr(self, name) is not None:
                _logger.warning("%s is not of fsdp_version=2, which always does so", name)
                setattr(self, name, None)
        if self.forward_prefetch is not None:
            raise ValueError(
                f"forward_prefetch={self.forward_prefetch}: fsdp_version=2 has no such option; leave it out, or say "
                "fsdp_version=1"
            )

    def _read_wrap_policy(self) -> None:
        given = self.auto_wrap_policy
        if given is None:
            given = value_from(f"{_ENV}AUTO_WRAP_POLICY", "NO_WRAP")
        if isinstance(given, str) and given.upper() not in _WRAP_POLICIES:
            raise ValueError(f"Invalid auto wrap policy: {given}. Must be one of {FSDP_AUTO_WRAP_POLICY}")
        self.auto_wrap_policy = _WRAP_POLICIES[given.upper()] if isinstance(given, str) else given
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            fill_unsaid(self, _ENV, min_num_params=0)
            if not isinstance(self.min_num_params, int):
                raise ValueError(
                    f"min_num_params={self.min_num_params!r}: `min_num_params` must be an integer"
                )
        names: Any = self.transformer_cls_names_to_wrap
        if names is None and self.auto_wrap_policy is transformer_auto_wrap_policy:
            names = environ.read(f"{_ENV}TRANSFORMER_CLS_TO_WRAP") or None
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        self.transformer_cls_names_to_wrap = names

    def _read_truths(self, *names: str) -> None:
        fill_unsaid(self, _ENV, **dict.fromkeys(names, False))
        for name in names:
            setattr(self, name, truth(getattr(self, name), of=name))


def allocate_empty(module: nn.Module) -> None:
    """Allocate uninitialised memory for a module's tensors, on the device that trains."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module.to_empty(device=device or torch.device("cpu"), recurse=False)


def meant_by(value: Any, words: Mapping[str, Any], field: str) -> Any:
    """Return torch's object for a field's value: a name in any case, a number, or the object itself."""
    if value in words.values():
        return value
    word = str(value).upper()
    if word.isdecimal() and 1 <= int(word) <= len(words):
        return list(words.values())[int(word) - 1]
    if word not in words:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(words)}")
    return words[word]


def mixed_precision_of(
    value: Any, version: int, buffer: torch.dtype | None = None
) -> MixedPrecision | MixedPrecisionPolicy:
    """Return the policy of a version of FSDP, for a mode, a dtype or a mapping with all fields of the policy.

    `buffer` is another dtype for buffers, in version 1 only.
    """
    names = _DTYPE_FIELDS[version]
    dtypes: dict[str, Any]
    if isinstance(value, Mapping):
        dtypes = dict(cast("Mapping[str, Any]", value))
        if dtypes.keys() != set(names) or not set(dtypes.values()) <= set(_MODES.values()):
            raise ValueError(
                f"mixed_precision_policy={value}: a dict needs the keys {', '.join(names)}, each with torch.float32, "
                "torch.float16 or torch.bfloat16"
            )
    else:
        dtype = _MODES.get(value) if isinstance(value, str) else value
        if dtype not in _MODES.values():
            raise ValueError(
                f"Invalid mixed precision: {value}. Must be one of {list(_MODES)}, or their dtypes"
            )
        dtypes = {name: dtype for name in names}  # noqa: C420 its values are of any type
    if version == 2:
        return MixedPrecisionPolicy(**dtypes)
    if buffer is not None:
        dtypes["buffer_dtype"] = buffer
    return MixedPrecision(**dtypes)
