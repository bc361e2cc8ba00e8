"""The in-place writes to tensors, by the counts that torch keeps of them; and modules that are known to write."""

from collections.abc import Mapping

from torch import Tensor, nn

from drivetrain_backends.compat import as_they_are, version_of


class Writes:
    """The writes to tensors since a moment, but those through `.data`; None for a tensor that does not exist yet."""

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors = tensors
        self._versions = self._now()

    def since(self) -> list[str]:
        """Return the names of tensors that were written to since this object was made, or since the last call."""
        before, self._versions = self._versions, self._now()
        if before == self._versions:
            return []
        pairs = zip(self._tensors, before, self._versions, strict=True)
        return [name for name, old, new in pairs if old != new and old is not None]

    def _now(self) -> list[int | None]:
        with as_they_are():
            return [None if tensor is None else version_of(tensor) for tensor in self._tensors.values()]


def check_no_renormalising(model: nn.Module, because: str) -> None:
    """Refuse embeddings whose forward writes into their weights."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) scales the "
                f"rows that it looks up in place, in its forward, and {because}. Leave max_norm out, and bound all "
                "rows after each step, on all ranks alike, inside accelerator.gathered(model, write=True): "
                "weight.copy_(weight.renorm(2, 0, max_norm)) under torch.no_grad()"
            )


def check_not_lazy(model: nn.Module) -> None:
    """Refuse parameters that get their shape at the first forward."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{type(model).__name__}: {name} has no shape yet (a lazy module), and ranks agree on shapes before "
                "they train: run one batch through the model before prepare(), and build the optimizer after it"
            )
