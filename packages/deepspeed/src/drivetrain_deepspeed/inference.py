"""Inference by DeepSpeed: layers in parts on all ranks, or weights that ranks gather from each other by layer."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from drivetrain_backends.compat import buffers_in
from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_deepspeed import compat
from drivetrain_deepspeed.library import check_drives, entering, know_local_rank, load_deepspeed
from drivetrain_state import ConnectError, Context, connect

Way = Literal["tensor", "zero"]
_NO_GROUP = (
    "DeepSpeed runs a model over a process group, and none is open: give the context of "
    "Accelerator(backend='deepspeed') or of connect(needs_group=True), which stays open as long as the model computes"
)


def infer_with_deepspeed(
    model: nn.Module,
    *,
    context: Context,
    way: Way | None = None,
    dtype: torch.dtype | None = None,
    offload_folder: Path | None = None,
    kernels: bool = False,
) -> nn.Module:
    """Return a model that a DeepSpeed engine runs on all ranks; `generate` works. Called on all ranks.

    Args:
        model: The model, with its weights on the host; the engine takes it apart.
        context: The ranks, whose process group stays open as long as the model computes.
        way: "tensor" cuts layers by their names (automatic tensor parallelism), so that all ranks compute one batch;
            "zero" has each rank compute its own batch with weights that all gather, layer by layer, from each other's
            host memory (ZeRO-Inference). None takes "tensor" where DeepSpeed can cut the model and the ranks' devices
            hold it.
        dtype: The dtype of floating-point parameters; None takes that of most of them. Buffers keep theirs.
        offload_folder: A folder on a fast local disk, where "zero" keeps the weights instead.
        kernels: Whether DeepSpeed's own kernels replace layers, which needs CUDA; with "tensor" only.

    Raises:
        BackendNotInstalledError: DeepSpeed, or for `offload_folder` libaio, is not installed, or DeepSpeed was
            imported for another kind of device.
        ConnectError: The context has no process group.
        ValueError: The arguments contradict each other, the device or the model.
    """
    if way is not None and way not in get_args(Way):
        raise ValueError(f"way={way!r}: must be one of {', '.join(get_args(Way))}, or None, which chooses")
    if isinstance(model, (PreparedForward, ModuleProxy)):
        raise ValueError(
            f"{type(model).__name__} is prepared for training, which DeepSpeed's engine would take apart: give a "
            "model of its own, built from what the training saved"
        )
    if context.group is None:
        raise ConnectError(_NO_GROUP)
    deepspeed: Any = load_deepspeed(context)
    dtype = dtype or _dtype_of(model)
    size = context.topology.world_size
    can_cut = size == 1 or kernels or compat.can_cut(model)
    way = way or _choose_way(model, dtype, context, can_cut=can_cut and offload_folder is None)
    _check(way, type(model).__name__, context, offload_folder, dtype, can_cut=can_cut, kernels=kernels)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    with entering(context):
        if way == "tensor":
            with _same_buffers(model):
                return deepspeed.init_inference(
                    model,
                    tensor_parallel={"tp_size": size},
                    dtype=dtype,
                    replace_with_kernel_inject=kernels,
                )
        config = zero_inference_config(dtype, size, offload_folder)
        linear = nn.functional.linear  # in whose place DeepSpeed 0.19 leaves its own, for training
        engine = deepspeed.initialize(model=model, config=config)[0]
        nn.functional.linear = linear
    know_local_rank(engine, context)
    engine.eval()
    return engine


def load_engine(model: nn.Module, *, dtype: torch.dtype | None, offload_folder: Path | None) -> nn.Module:
    """Return a model that a DeepSpeed engine runs, as the engine "deepspeed" of `load_checkpoint_and_dispatch`.

    Raises:
        ConnectError: No process group is open; see `infer_with_deepspeed` for what else is raised.
    """
    if not dist.is_initialized():
        raise ConnectError(_NO_GROUP)
    with connect() as context:  # it owns no group, so that its end leaves the group to whoever opened it
        return infer_with_deepspeed(model, context=context, dtype=dtype, offload_folder=offload_folder)


def zero_inference_config(dtype: torch.dtype, world_size: int, offload_folder: Path | None) -> dict[str, Any]:
    """Return the configuration of an engine that gathers weights layer by layer. Pure."""
    place: dict[str, Any] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_folder is not None:
        place |= {"device": "nvme", "nvme_path": str(offload_folder)}
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return {
        "train_micro_batch_size_per_gpu": 1,  # which it asks for, and inference does not read
        "train_batch_size": world_size,
        "zero_optimization": {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 0},
        **({} if name is None else {name: {"enabled": True}}),
    }


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's floating-point elements."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _choose_way(model: nn.Module, dtype: torch.dtype, context: Context, *, can_cut: bool) -> Way:
    """Return the way for a model: in parts where it can be cut and the devices hold the parts, else gathered."""
    if not can_cut:
        return "zero"
    if context.device.type == "cpu":  # whose memory is the host's, where the model is already
        return "tensor" if context.topology.num_nodes == 1 else "zero"
    sizes = [(p.numel(), dtype if p.is_floating_point() else p.dtype) for p in model.parameters()]
    free_bytes, _ = torch.get_device_module(context.device).mem_get_info(context.device)
    needed_bytes = sum(number * kind.itemsize for number, kind in sizes)
    return fitting_way(needed_bytes, free_bytes, context.topology.world_size)


def fitting_way(needed_bytes: int, free_bytes: int, world_size: int) -> Way:
    """Return the way for weights on devices: in parts where 1.2 times a rank's part is free on each. Pure."""
    return "tensor" if 1.2 * needed_bytes / world_size <= free_bytes else "zero"


def _check(
    way: Way,
    name: str,
    context: Context,
    offload_folder: Path | None,
    dtype: torch.dtype,
    *,
    can_cut: bool,
    kernels: bool,
) -> None:
    """Refuse a way that cannot run the model called `name`."""
    device, num_nodes = context.device.type, context.topology.num_nodes
    if kernels and device != "cuda":
        raise ValueError(
            f"kernels=True on {device!r}: DeepSpeed's kernels need CUDA; leave it out, and layers are cut but stay "
            "torch's"
        )
    if way == "zero":
        if kernels:
            raise ValueError("kernels=True with way='zero': gathered weights are torch's; say way='tensor'")
        if offload_folder is not None:
            if device == "cpu" and dtype != torch.bfloat16:
                raise ValueError(
                    f"offload_folder with weights of {dtype} on the CPU: DeepSpeed 0.19 would round them to bf16; "
                    "say dtype=torch.bfloat16, or leave the folder out"
                )
            check_drives(f"offload_folder={str(offload_folder)!r}")
        return
    if offload_folder is not None:
        raise ValueError("offload_folder with way='tensor': ranks hold all their parts; say way='zero'")
    if device == "cpu" and num_nodes > 1:
        raise ValueError(
            f"way='tensor' on the CPUs of {num_nodes} hosts: DeepSpeed sums over the shared memory of one; say "
            "way='zero'"
        )
    if not can_cut:
        raise ValueError(
            f"way='tensor': DeepSpeed does not know where to cut the layers of {name}; say way='zero'"
        )


@contextmanager
def _same_buffers(model: nn.Module) -> Generator[None]:
    """Keep the dtypes of a model's buffers, such as frequencies in fp32, where an engine converts the whole model."""
    before = [(buffers_in(module), dict(buffers_in(module))) for module in model.modules()]
    yield
    for buffers, old in before:
        buffers |= {name: b.to(buffers[name].device) for name, b in old.items() if b is not None}
