"""Inference by DeepSpeed: layers in parts on all ranks, or weights that ranks gather from each other by layer."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from drivetrain_config import environ
from drivetrain_deepspeed.library import entering, load_deepspeed
from drivetrain_state import Context, connect

Way = Literal["tensor", "zero"]


def infer_with_deepspeed(
    model: nn.Module,
    *,
    context: Context | None = None,
    way: Way | None = None,
    dtype: torch.dtype | None = None,
    offload_folder: Path | None = None,
    kernels: bool = False,
) -> nn.Module:
    """Return a model that a DeepSpeed engine runs on all ranks; `generate` works. Called on all ranks.

    Args:
        model: The model, with its weights on the host; the engine takes it apart.
        context: The ranks; None connects those of this launch.
        way: "tensor" cuts layers by their names (automatic tensor parallelism), so that all ranks compute one batch;
            "zero" has each rank compute its own batch with weights that all gather, layer by layer, from each other's
            host memory (ZeRO-Inference). None takes "tensor" where the ranks' devices hold the model.
        dtype: The dtype in which floating-point tensors compute; None keeps those of the model.
        offload_folder: A folder on a fast local disk, where "zero" keeps the weights instead.
        kernels: Whether DeepSpeed's own kernels replace layers, which needs CUDA; with "tensor" only.

    Raises:
        BackendNotInstalledError: DeepSpeed is not installed, or was imported for another kind of device.
        ValueError: The arguments contradict each other or the device.
    """
    context = context or connect(needs_group=True)
    if kernels and context.device.type != "cuda":
        raise ValueError(
            f"kernels=True on {context.device.type!r}: DeepSpeed's kernels need CUDA; leave it out, and layers are "
            "cut but stay torch's"
        )
    way = way or _fitting_way(model, dtype, context, offload_folder)
    if way == "tensor" and offload_folder is not None:
        raise ValueError("offload_folder with way='tensor': ranks hold all their parts; say way='zero'")
    topology = context.topology
    if way == "tensor" and context.device.type == "cpu" and topology.num_nodes > 1:
        raise ValueError(
            f"way='tensor' on the CPUs of {topology.num_nodes} hosts: DeepSpeed sums over the shared memory of one; "
            "say way='zero'"
        )
    if way == "zero" and kernels:
        raise ValueError("kernels=True with way='zero': gathered weights are torch's; say way='tensor'")
    deepspeed: Any = load_deepspeed(context)
    if dtype is not None:
        model = model.to(dtype)
    size = topology.world_size
    with entering(context):
        if way == "tensor":
            return deepspeed.init_inference(
                model,
                tensor_parallel={"tp_size": size},
                dtype=_dtype_of(model),
                replace_with_kernel_inject=kernels,
            )
        config = zero_inference_config(model, size, offload_folder)
        engine = deepspeed.initialize(model=model, config=config)[0]
    if environ.read("LOCAL_RANK") is None:  # stage 3 reads it in every forward, and a single process lacks it
        environ.put(LOCAL_RANK=str(topology.local_rank))
        context.before_close(partial(environ.put, LOCAL_RANK=None))
    engine.eval()
    return engine


def zero_inference_config(model: nn.Module, world_size: int, offload_folder: Path | None) -> dict[str, Any]:
    """Return the configuration of an engine that gathers weights layer by layer. Pure."""
    place: dict[str, Any] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_folder is not None:
        place |= {"device": "nvme", "nvme_path": str(offload_folder)}
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(_dtype_of(model))
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


def _fitting_way(
    model: nn.Module, dtype: torch.dtype | None, context: Context, offload_folder: Path | None
) -> Way:
    """Return the way for a model: in parts where the devices hold them with a fifth to spare, else gathered."""
    if offload_folder is not None:
        return "zero"
    if context.device.type == "cpu":  # whose memory is the host's, where the model is already
        return "tensor" if context.topology.num_nodes == 1 else "zero"
    needed = sum(p.numel() * (dtype or p.dtype).itemsize for p in model.parameters())
    free, _ = torch.get_device_module(context.device).mem_get_info(context.device)
    return "tensor" if 1.2 * needed / context.topology.world_size <= free else "zero"


def load_engine(model: nn.Module, *, dtype: torch.dtype | None, offload_folder: Path | None) -> nn.Module:
    """Return a model that a DeepSpeed engine runs, as the engine "deepspeed" of `load_checkpoint_and_dispatch`."""
    return infer_with_deepspeed(model, dtype=dtype, offload_folder=offload_folder)
