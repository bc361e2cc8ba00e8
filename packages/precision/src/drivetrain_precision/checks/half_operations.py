"""Operations that lose accuracy in half precision: rules on the operations that torch dispatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import ref

from torch import Tensor
from torch import bfloat16 as bf16
from torch import float16 as fp16

Kind = Literal["softmax", "norm", "loss", "sum"]
# "computed": values in between are rounded to half, or a loss is; "rounded": torch's kernel computes in fp32, and
# rounds its result alone.
Damage = Literal["computed", "rounded"]

HALF = frozenset({fp16, bf16})
# Sums of fewer values neither overflow fp16 nor lose the small ones.
_MANY = 256
# The operations by the names that torch dispatches, without a leading underscore.
_FORMS = {
    "loss": "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss ctc_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits log_softmax multi_margin_loss "
    "multilabel_margin_loss_forward",
    "softmax": "softmax safe_softmax",
    "norm": "native_layer_norm native_group_norm native_batch_norm native_batch_norm_legit fused_rms_norm "
    "batch_norm_with_update cudnn_batch_norm miopen_batch_norm linalg_vector_norm norm var std var_mean std_mean",
    "running sum": "cumsum cumprod logcumsumexp",
    "sum": "sum mean",
}
_FORM_OF = {name: form for form, names in _FORMS.items() for name in names.split()}
_REPAIRS: dict[str, str] = {
    "softmax": "compute it in fp32: F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)",
    "log_softmax": "compute it in fp32: F.log_softmax(scores, dim=-1, dtype=torch.float32)",
    "layer norm": "give it fp32: F.layer_norm(x.float(), ...) with weights in fp32, then .to(x.dtype)",
    "norm": "compute it in fp32: x.float() before the squares, .to(x.dtype) after the division; F.rms_norm does so",
    "loss": "compute it in fp32: F.cross_entropy(logits.float(), ...), or without the copy "
    "drivetrain_precision.cross_entropy(logits, labels)",
    "sum": "add in fp32: x.sum(dtype=torch.float32)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfVerdict:
    """The damage that an operation does in half precision, and advice on the code to write instead."""

    operation: str
    kind: Kind
    damage: Damage
    repair: str


def inside_function(verdict: HalfVerdict, function: str) -> HalfVerdict:
    """Return the verdict on a torch.nn.functional function, given the verdict on an operation inside it."""
    is_loss = function.endswith(("loss", "cross_entropy", "_with_logits", "kl_div"))
    return replace(verdict, kind="loss", damage="computed", repair=_REPAIRS["loss"]) if is_loss else verdict


class Judge:
    """A judge of successive operations; it remembers squares and exponentials until they are summed."""

    def __init__(self) -> None:
        self._squares: dict[int, ref[Tensor]] = {}
        self._exponentials: dict[int, ref[Tensor]] = {}

    def verdict(self, name: str, args: Sequence[Any], result: Any) -> HalfVerdict | None:
        """Return the verdict on an operation, such as "_softmax"; None if it loses nothing."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        made = result[0] if isinstance(result, (tuple, list)) and result else result
        if first is None or first.dtype not in HALF or not isinstance(made, Tensor) or made.dtype not in HALF:
            return None
        name = name.removeprefix("_").removesuffix("_")
        is_square = (
            name == "square"
            or (name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 2)
            or (name == "mul" and len(args) > 1 and args[0] is args[1])
        )
        if is_square:
            self._squares[id(made)] = ref(made)
        elif name == "exp":
            self._exponentials[id(made)] = ref(made)
        form = _FORM_OF.get(name)
        if form == "loss":
            found = _verdict(name, "loss", "computed")
            return replace(found, repair=_REPAIRS[name]) if name in _REPAIRS else found
        if form == "softmax":
            return _verdict(name, "softmax", "rounded")
        if name == "logsumexp":
            return _verdict(name, "softmax", "computed")
        if form == "norm":
            by = "layer norm" if "_norm" in name and not name.startswith("linalg") else "norm"
            return replace(_verdict(name.removeprefix("native_"), "norm", "rounded"), repair=_REPAIRS[by])
        if form == "running sum" and first.numel() and first.shape[args[1] if len(args) > 1 else 0] >= _MANY:
            return _verdict(name, "sum", "computed")
        return self._judge_sum(name, first, made) if form == "sum" else None

    def _judge_sum(self, name: str, added: Tensor, made: Tensor) -> HalfVerdict | None:
        if _holds(self._exponentials, added):
            return _verdict(f"{name} of exponentials", "softmax", "computed")
        if _holds(self._squares, added):
            kind: Kind = "loss" if made.numel() == 1 and added.requires_grad else "norm"
            return _verdict(f"{name} of squares", kind, "computed")
        if made.numel() == 1 < added.numel() and added.requires_grad:
            return _verdict(name, "loss", "rounded")
        many = added.numel() >= _MANY * max(1, made.numel())
        return _verdict(name, "sum", "rounded") if name == "sum" and many and added.dtype is fp16 else None


def _holds(seen: dict[int, ref[Tensor]], tensor: Tensor) -> bool:
    kept = seen.get(id(tensor))
    return kept is not None and kept() is tensor


def _verdict(operation: str, kind: Kind, damage: Damage) -> HalfVerdict:
    return HalfVerdict(operation=operation, kind=kind, damage=damage, repair=_REPAIRS[kind])
