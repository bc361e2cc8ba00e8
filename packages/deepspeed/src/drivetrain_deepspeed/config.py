"""The configuration of a DeepSpeed engine: derived from the run, and compared with a given configuration.

Every key whose default changes the mathematics is set explicitly: 0.19 clips gradients to a norm of 1 if
`gradient_clipping` is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any, NamedTuple, cast

from drivetrain_config.files.file_text import parse_json, read_text
from drivetrain_deepspeed.config_checks import check_keys, check_possible
from drivetrain_deepspeed.errors import EngineConfigError
from drivetrain_deepspeed.settings import DeepSpeedSettings
from drivetrain_precision.settings import PrecisionSettings

_DEFAULT_STAGE = 2
_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's own default; a smaller model needs no larger buffer
_PREFETCH_ELEMENTS = 50_000_000
_PERSISTENT_ELEMENTS = 100_000
_OF_SOME_STAGES = frozenset(  # "auto" is allowed for these at every stage, as in a file for several stages
    f"zero_optimization.{name}"
    for name in (
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The properties of the run that determine an engine's configuration."""

    world_size: int  # the number of ranks of the engine
    gradient_accumulation_steps: int = 1  # the number of micro-batches in a window
    micro_batch_size: int | None = None  # the samples of a micro-batch on one rank; None if no loader sets it
    mode: str = "no"  # the precision: "no", "fp16" or "bf16"
    scaling: PrecisionSettings | None = None  # the settings of the loss scale, for fp16
    # The name of the dtype in which ranks add up gradients; None if the run does not say.
    reduce: str | None = None
    # The number of trainable parameter elements of the model; None before there is a model.
    num_elements: int | None = None
    optimizer: str | None = None  # the class name of the prepared optimizer; None without one
    # The options that all of its parameter groups share.
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Key(NamedTuple):
    """A value of the configuration."""

    value: Any
    # The setting of the run that requires exactly this value, such as "mixed_precision='bf16'"; None for a default,
    # which a given configuration may replace.
    said: str | None = None


def engine_config(settings: DeepSpeedSettings, run: EngineRun) -> dict[str, Any]:
    """Return an engine's full configuration, nested as DeepSpeed reads it; refuse unknown keys and contradictions."""
    given, where = read_given(settings.config)
    check_keys(given, where)
    if run.optimizer is None:  # nothing is trained, at least not yet
        given.pop("optimizer", None)
    flat = flatten(given)
    stage = flat.get("zero_optimization.stage", "auto")
    keys = _keys(settings, run, _key_of(settings, "stage", _DEFAULT_STAGE if stage == "auto" else stage))
    if run.optimizer is not None:
        keys |= _optimizer_keys(run)
    merged = _merge(keys, flat, where)
    if run.micro_batch_size is None:
        merged |= _batch_sizes(flat, merged, run)
    check_possible(merged, run.mode, run.world_size)
    if run.scaling is not None:
        # Compared above; the engine gets the scale of each step from outside, and must not adjust its own.
        merged = {name: value for name, value in merged.items() if name not in _scaling_keys(run.scaling)}
        merged["fp16.loss_scale"] = 1.0
    return nest(merged)


def read_given(config: Mapping[str, Any] | Path | None) -> tuple[dict[str, Any], str]:
    """Return a given configuration, and its name for messages."""
    if config is None:
        return {}, "deepspeed.config"
    if not isinstance(config, Path):
        return dict(config), "deepspeed.config"
    name = f"deepspeed.config={str(config)!r}"
    try:
        read = parse_json(config, read_text(config), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise EngineConfigError(f"{name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise EngineConfigError(f"{name}: is no JSON that can be used ({error})") from error
    if not isinstance(read, dict):
        raise EngineConfigError(f"{name}: must hold an object, not a {type(read).__name__}")
    return cast("dict[str, Any]", read), str(config)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted name: `{"bf16": {"enabled": True}}` becomes `{"bf16.enabled": True}`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings from dotted names; the reverse of `flatten`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{sorted(twice)} stand there twice")
    return dict(pairs)


def _keys(settings: DeepSpeedSettings, run: EngineRun, stage: Key) -> dict[str, Key]:
    """Return the keys that follow from the run and its settings, by dotted name."""
    accumulation = run.gradient_accumulation_steps
    micro_batch = run.micro_batch_size
    said_accumulation = f"gradient_accumulation_steps={accumulation}"
    said_batch = None if micro_batch is None else f"the prepared loaders' batch_size={micro_batch}"
    half = f"mixed_precision={run.mode!r}"
    keys = {
        "train_micro_batch_size_per_gpu": Key(micro_batch or 1, said_batch),
        "gradient_accumulation_steps": Key(accumulation, said_accumulation),
        "train_batch_size": Key(
            (micro_batch or 1) * accumulation * run.world_size,
            said_batch and f"{said_batch}, {said_accumulation} and {run.world_size} processes",
        ),
        "managed_gradient_accumulation": Key(True, "the accumulation window, which is drivetrain's"),
        "gradient_clipping": Key(0.0),
        "gradient_allreduce_op": Key("mean", "the mean over ranks, which losses are normalised for"),
        "prescale_gradients": Key(False),
        "gradient_predivide_factor": Key(1.0),
        "communication_data_type": _reduction(settings, run),
        "data_types.grad_accum_dtype": _key_of(settings, "grad_accum_dtype", "fp32"),
        "bf16.enabled": Key(run.mode == "bf16", half),
        "fp16.enabled": Key(run.mode == "fp16", half),
        "torch_autocast.enabled": Key(False, f"{half}, which says what models compute in"),
        "zero_allow_untested_optimizer": Key(True),  # prepare() has tested it, see `elementwise`
        "zero_force_ds_cpu_optimizer": Key(False),
        "zero_optimization.stage": stage,
    }
    if run.mode == "bf16":
        keys |= {
            "bf16.check_grad_overflow": Key(False),
            "bf16.immediate_grad_update": Key(False),
            "bf16.bf16_master_weights_and_grads": Key(False),
            "bf16.bf16_optimizer_states": Key(False),
        }
    if run.mode == "fp16":
        keys["fp16.fp16_master_weights_and_grads"] = Key(False)
    if run.scaling is not None:
        keys |= _scaling_keys(run.scaling)
    return keys | _zero_keys(settings, run, stage.value)


def _scaling_keys(scaling: PrecisionSettings) -> dict[str, Key]:
    """Return the keys that a given `fp16` section must match: the run's loss scale, kept outside the engine."""
    initial, interval, least = scaling.initial_scale, scaling.growth_interval, scaling.min_scale
    return {
        "fp16.loss_scale": Key(0, "a loss scale that moves"),
        "fp16.initial_scale_power": Key(log2(initial), f"precision.initial_scale={initial}"),
        "fp16.loss_scale_window": Key(interval, f"precision.growth_interval={interval}"),
        "fp16.hysteresis": Key(1, "a loss scale that falls at each overflow"),
        "fp16.consecutive_hysteresis": Key(False, "a loss scale that falls at each overflow"),
        "fp16.min_loss_scale": Key(least, f"precision.min_scale={least}"),
        "fp16.auto_cast": Key(False, "autocast inside the model, which casts inputs"),
    }


def _zero_keys(settings: DeepSpeedSettings, run: EngineRun, stage: int) -> dict[str, Key]:
    offload = {
        name: key
        for place, least in (("offload_optimizer", 1), ("offload_param", 3))
        for name, key in _offload_keys(settings, place).items()
        if stage >= least or key.said is not None
    }
    if stage == 0:
        return {f"zero_optimization.{name}": key for name, key in offload.items()}
    fitting = min(_BUCKET_ELEMENTS, run.num_elements or _BUCKET_ELEMENTS)
    zero = {
        "reduce_bucket_size": _key_of(settings, "reduce_bucket_size", fitting),
        "overlap_comm": _key_of(settings, "overlap_comm", stage == 3),
        "contiguous_gradients": Key(True),
        "reduce_scatter": Key(True),
        "ignore_unused_parameters": Key(True),
        "zero_quantized_weights": Key(False),
        "zero_quantized_nontrainable_weights": Key(False),
        "zero_quantized_gradients": Key(False),
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": Key(min(_PREFETCH_ELEMENTS, fitting)),
            "stage3_param_persistence_threshold": Key(_PERSISTENT_ELEMENTS),
        }
    else:
        zero["allgather_bucket_size"] = _key_of(settings, "allgather_bucket_size", fitting + fitting % 2)
    return {f"zero_optimization.{name}": key for name, key in (zero | offload).items()}


def _offload_keys(settings: DeepSpeedSettings, name: str) -> dict[str, Key]:
    keys = {f"{name}.device": _key_of(settings, name, "none")}
    if settings.nvme_path is not None and getattr(settings, name) == "nvme":
        keys[f"{name}.nvme_path"] = Key(str(settings.nvme_path), f"nvme_path={settings.nvme_path}")
    return keys


def _key_of(settings: DeepSpeedSettings, name: str, default: object) -> Key:
    value = getattr(settings, name)
    return Key(default) if value is None else Key(value, f"deepspeed.{name}={value!r}")


def _reduction(settings: DeepSpeedSettings, run: EngineRun) -> Key:
    """Return the dtype in which ranks add up gradients, as set by the section or the run."""
    own = settings.communication_data_type
    if run.reduce is None:
        return _key_of(settings, "communication_data_type", "fp32")
    if own not in (None, run.reduce):
        raise EngineConfigError(
            f"deepspeed.communication_data_type={own!r} with precision.reduce_dtype={run.reduce!r}: both say in what "
            "ranks add up gradients, and they differ; leave one of the two out"
        )
    return Key(run.reduce, f"precision.reduce_dtype={run.reduce!r}")


def _optimizer_keys(run: EngineRun) -> dict[str, Key]:
    """Return the keys that a given `optimizer` section must match, from the prepared optimizer."""
    keys = {"optimizer.type": Key(run.optimizer, f"the prepared optimizer, {run.optimizer}")}
    for name, value in run.optimizer_options.items():
        plain = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
        keys[f"optimizer.params.{name}"] = Key(plain, f"{name}={plain!r} of the prepared {run.optimizer}")
    return keys


def _merge(keys: Mapping[str, Key], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = {
        name: key.value for name, key in keys.items() if not name.startswith("optimizer.") or name in given
    }
    for name, value in given.items():
        key = keys.get(name)
        if value == "auto":
            if key is None and name not in _OF_SOME_STAGES:
                raise EngineConfigError(
                    f'{where}: {name} is "auto", and nothing in the run says what it should be; write the value'
                )
        elif key is not None and key.said is not None and _plain(name, value) != _plain(name, key.value):
            raise EngineConfigError(
                f'{where}: {name}={value!r} contradicts {key.said}; make them equal, or write "auto"'
            )
        else:
            merged[name] = value
    return merged


def _plain(name: str, value: Any) -> Any:
    return str(value).lower() if name == "optimizer.type" else value


def _batch_sizes(given: Mapping[str, Any], merged: Mapping[str, Any], run: EngineRun) -> dict[str, int]:
    """Return the batch size that is not given, if the configuration gives the other size and no loader sets any."""
    micro, whole = "train_micro_batch_size_per_gpu", "train_batch_size"
    micro_batches = merged["gradient_accumulation_steps"] * run.world_size
    said = [name for name in (micro, whole) if given.get(name, "auto") != "auto"]
    if said == [micro]:
        return {whole: merged[micro] * micro_batches}
    return {micro: merged[whole] // micro_batches} if said == [whole] else {}
