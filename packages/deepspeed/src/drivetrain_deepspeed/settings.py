"""The configuration section of the backend: `deepspeed`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal


def _setting(
    default: Any, text: str, *, ask: str = "", needs: str = "", is_json: bool = False, brief: str = ""
) -> Any:
    """Return a field with its help, whole and brief, its question in `deepspeed_advice` and its conditions."""
    advice = f"drivetrain_deepspeed.deepspeed_advice:{ask}" if ask else ""
    metadata = {
        "help": text,
        "ask": advice,
        "needs": needs,
        "json_file": is_json,
        "brief": brief,
        "topic": "Training",
    }
    return field(default=default, metadata={key: value for key, value in metadata.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """The settings by which DeepSpeed partitions and offloads; unset values come from `config` or from the run.

    Attributes:
        requires: The modules that the backend needs; `drivetrain config` names a missing module.
    """

    requires: ClassVar[tuple[str, ...]] = ("deepspeed",)

    config: dict[str, Any] | Path | None = _setting(  # noqa: RUF009
        None,
        "DeepSpeed configuration, as a JSON file or a mapping; the run fills in values of 'auto'.",
        is_json=True,
    )
    stage: Literal[0, 1, 2, 3, "auto"] | None = _setting(
        None,
        "Parts of the training state that ZeRO partitions: 0 none, 1 optimizer states, 2 also gradients, 3 "
        "also parameters; auto: planned, with where it is offloaded if that is not said, from the first prepared "
        "model; unset: 2.",
        ask="ask_stage",
        brief="Stage of ZeRO: 0, 1, 2, 3 or auto",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = _setting(
        None, "Location of optimizer states and master weights (stages 1 to 3).", ask="ask_offload_optimizer"
    )
    offload_param: Literal["none", "cpu", "nvme"] | None = _setting(
        None, "Location of parameters between their uses (stage 3).", ask="ask_offload_param"
    )
    nvme_path: Path | None = _setting(  # noqa: RUF009
        None,
        "Folder on a fast local disk, for offloading to nvme.",
        ask="ask_nvme_path",
        needs="offload_optimizer=nvme or offload_param=nvme",
    )
    reduce_bucket_size: int | None = _setting(
        None, "Number of gradient elements to reduce at a time; the model's own number if that is smaller."
    )
    allgather_bucket_size: int | None = _setting(
        None, "Number of parameter elements to gather at a time (stages 1 and 2)."
    )
    overlap_comm: bool | None = _setting(
        None, "Whether to reduce gradients while backward continues; unset: in stage 3 only."
    )
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = _setting(
        None, "Dtype in which gradients are accumulated; unset: fp32."
    )
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = _setting(
        None, "Dtype in which gradients are reduced over ranks; unset: fp32."
    )

    def __post_init__(self) -> None:
        """Refuse a value outside its range; the message begins with the field's name."""
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: must be at least 1 element")
        if (self.allgather_bucket_size or 0) % 2:
            raise ValueError(
                f"allgather_bucket_size={self.allgather_bucket_size!r}: must be even, DeepSpeed's own rule"
            )
        if "nvme" in (self.offload_optimizer, self.offload_param) and self.nvme_path is None:
            raise ValueError("nvme_path=None: offloading to nvme needs a folder on that disk")
        if self.offload_param in ("cpu", "nvme") and self.stage not in (None, "auto", 3):
            raise ValueError(
                f"offload_param={self.offload_param!r}: parameters are offloaded in stage 3 alone, not {self.stage}"
            )
        if self.offload_optimizer in ("cpu", "nvme") and self.stage == 0:
            raise ValueError(
                f"offload_optimizer={self.offload_optimizer!r}: stage 0 partitions nothing; say stage 1, 2 or 3"
            )
        if self.offload_optimizer == "nvme" and self.stage not in (None, "auto", 3):
            raise ValueError(
                f"offload_optimizer='nvme': needs stage 3, not {self.stage}; 'cpu' works from stage 1 on"
            )
