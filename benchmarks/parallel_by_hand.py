"""What an expert writes with torch alone to divide the models of benchmarks/parallel.py among two ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_models import Step, loop, make, make_long, make_routed, mesh
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW


def layers() -> Step:
    """parallelize_module: the input of each half of a block enters the divided layers once."""
    from torch.distributed.tensor import Placement, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = make()
    whole: dict[str, Placement] = {"hidden_states": Replicate()}
    of_block: dict[str, Any] = {
        "self_attn": PrepareModuleInput(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    plan: dict[str, Any] = {f"model.layers.*.{name}": style for name, style in of_block.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return loop(parallelize_module(model, mesh(), plan), x)


def sequences() -> Step:
    """Each rank reads its own half of the tokens, and exchanges heads."""
    from torch.distributed.nn.functional import all_to_all_single
    from transformers import AttentionInterface

    def to_heads(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (2, -1)).movedim(1, 0).contiguous()
        return all_to_all_single(torch.empty_like(parts), parts).movedim(0, 2).flatten(2, 3)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        del module
        whole = (to_heads(x) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)  # type: ignore[arg-type]
        parts = mixed.unflatten(2, (2, -1)).movedim(2, 0).contiguous()
        own = all_to_all_single(torch.empty_like(parts), parts).movedim(0, 1).flatten(1, 2)
        return own.transpose(1, 2), None

    AttentionInterface.register("by_heads", attend)
    model, x = make_long()
    model.set_attn_implementation("by_heads")
    labels = F.pad(x[:, 1:], (0, 1), value=-100)
    own, half = dist.get_rank() * x.shape[1] // 2, x.shape[1] // 2
    x, labels = x[:, own : own + half], labels[:, own : own + half]
    positions = torch.arange(own, own + half)[None]
    optimizer, count = AdamW(model.parameters()), 2 * (2 * half - 1)

    def step() -> float:
        logits = model(x, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat)
        for one, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(summed.view_as(one))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        return loss.item()

    return step


def _gathered(part: Tensor) -> Tensor:
    parts = part.new_empty(2 * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous())
    return torch.cat(parts.chunk(2), 1)


def _reduced(whole: Tensor) -> Tensor:
    halves = torch.cat(whole.chunk(2, 1))
    found = torch.empty_like(halves[: whole.shape[0]])
    dist.reduce_scatter_tensor(found, halves)
    return found


def _own(whole: Tensor) -> Tensor:
    return whole.chunk(2, 1)[dist.get_rank()].contiguous()


class _Between(Function):
    """A function of a tensor, with another one for its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.function = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.function(gradients[0]), None, None


def between_layers() -> Step:
    """Megatron's sequence parallelism: gathers and reductions around the divided layers, norms on halves."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = make()
    rank = dist.get_rank()
    for block in model.model.layers:
        for holder, columns, row in (
            (block.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"),
            (block.mlp, ("gate_proj", "up_proj"), "down_proj"),
        ):
            for name in columns:
                layer = getattr(holder, name)
                layer.weight = nn.Parameter(layer.weight.detach().chunk(2)[rank].clone())
            layer = getattr(holder, row)
            layer.weight = nn.Parameter(layer.weight.detach().chunk(2, 1)[rank].clone())
            holder.register_forward_pre_hook(_given_whole, with_kwargs=True)
            holder.register_forward_hook(_with_own_half)
    first = model.model.layers[0]
    first.register_forward_pre_hook(lambda _, args: (_Between.apply(args[0], _own, _gathered), *args[1:]))
    model.model.norm.register_forward_hook(lambda _, __, out: _Between.apply(out, _gathered, _own))
    ends: Any = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh(), ends)
    norms = [p for name, p in model.named_parameters() if "norm" in name]

    def add_up_norms() -> None:
        gradients = [p.grad for p in norms if p.grad is not None]
        flat = torch.cat(gradients)
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([len(each) for each in gradients]), strict=True):
            gradient.copy_(summed)

    kinds = (
        [p for p in model.parameters() if isinstance(p, DTensor) is is_divided]
        for is_divided in (True, False)
    )
    return loop(model, x, [{"params": each} for each in kinds], add_up_norms)


def _given_whole(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _Between.apply(kwargs["hidden_states"], _gathered, _reduced)}
    return (_Between.apply(args[0], _gathered, _reduced), *args[1:]), kwargs


def _with_own_half(_: Any, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return _Between.apply(output[0], _reduced, _gathered), *output[1:]
    return _Between.apply(output, _reduced, _gathered)


def experts(*, sharded: bool = False) -> Step:
    """Each rank holds half of the experts of each block, tokens are exchanged, and FSDP2 shards all else.

    With `sharded`, experts too are those of FSDP2, over the one rank that holds them, as they would be over several.
    """
    from torch.distributed.fsdp import fully_shard

    model, x = make_routed()
    lone = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("shard", "expert"))["shard"]
    held: list[nn.Parameter] = []
    for block in model.blocks:
        own: Any = block.experts
        for name in ("up", "down"):
            setattr(own, name, nn.Parameter(getattr(own, name).detach().chunk(2)[dist.get_rank()].clone()))
        own.num_experts //= 2
        own.forward = _exchanging(own)
        if sharded:
            fully_shard(own, mesh=lone)
        fully_shard(block, ignored_params=set(own.parameters()))
        held += own.parameters()
    fully_shard(model, ignored_params=set(held))
    others = [p for p in model.parameters() if all(p is not each for each in held)]
    optimizer = AdamW([{"params": others}, {"params": held}])

    def step() -> float:
        loss = model(x, labels=x).loss
        loss.backward()
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad /= 2  # of the ranks' losses, whose mean is trained on
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        return mean.item()

    return step


def _exchanging(own: Any) -> Any:
    from torch.distributed.nn.functional import all_to_all_single

    compute = own.forward

    def forward(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen, num_choices = index.flatten(), index.shape[1]
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=2 * own.num_experts)
        wanted = torch.empty_like(counts)
        dist.all_to_all_single(wanted, counts)
        sent, received = (each.view(2, -1).sum(1).tolist() for each in (counts, wanted))
        given = tokens[order // num_choices]
        rows = all_to_all_single(given.new_empty(sum(received), given.shape[1]), given, received, sent)
        numbers = torch.arange(own.num_experts).repeat(2).repeat_interleave(wanted)
        computed = compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        returned = all_to_all_single(torch.empty_like(given), computed, sent, received)
        by_choice = torch.zeros_like(returned).index_copy(0, order, returned)
        return (by_choice.view(*index.shape, -1) * weights[..., None]).sum(1)

    return forward
