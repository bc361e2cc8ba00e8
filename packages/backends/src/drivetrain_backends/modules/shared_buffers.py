"""Copy rank 0's buffers to all ranks, as under DDP: otherwise batch normalisation statistics differ by rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import buffers_in, version_of
from drivetrain_state import Context, broadcast

_MOST_MODELS = 60  # with a bit each in one integer; models beyond share the last bit


class SharedBuffers:
    """The buffers of a backend's models. If a buffer has changed, the next step broadcasts rank 0's buffers."""

    def __init__(self, context: Context, *, enabled: bool) -> None:
        self._context = context
        self.is_enabled = enabled
        self._models: dict[nn.Module, _Buffers] = {}

    def watch(self, model: nn.Module) -> None:
        """Watch a model's buffers from now on; they must be the same on all ranks."""
        if self.is_enabled and self._context.ranks("counts").size > 1:
            self._models[model] = _Buffers(model)

    def news(self) -> int:
        """Return the models whose buffers have changed on this rank, as an integer with a bit for each model."""
        bits = 0
        for index, buffers in enumerate(self._models.values()):
            if buffers.have_changed():
                bits |= 1 << min(index, _MOST_MODELS)
        return bits

    def share(self, news: Sequence[int]) -> None:
        """Broadcast rank 0's buffers of the models that are in the `news` of any rank. Called on all ranks."""
        for index, buffers in enumerate(self._models.values()):
            bit = 1 << min(index, _MOST_MODELS)
            if any(bits & bit for bits in news):
                buffers.follow_first(self._context)

    def forget(self, model: nn.Module) -> None:
        """Stop watching a model."""
        self._models.pop(model, None)


class _Buffers:
    """The buffers of a model, which may be written in place or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = [
            (buffers_in(module), name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._take_up()

    def have_changed(self) -> bool:
        return bool(self._slots) and self._versions() != self._seen

    @torch.no_grad()
    def follow_first(self, context: Context) -> None:
        buffers = self._now()
        received = broadcast(context, buffers, over="counts")
        if context.ranks("counts").index:
            for buffer, value in zip(buffers, received, strict=True):
                buffer.copy_(value)
        self._take_up()

    def _take_up(self) -> None:
        self._held = self._now()  # held, so that no new tensor reuses the id of one of them
        self._seen = self._versions()

    def _now(self) -> list[Tensor]:
        found: dict[Tensor, None] = {}
        for slots, name in self._slots:
            if (buffer := slots.get(name)) is not None:
                found[buffer] = None
        return list(found)

    def _versions(self) -> list[tuple[int, int]]:
        # A tensor created under inference_mode has no version: only its replacement is detected.
        return [(id(b), 0 if b.is_inference() else version_of(b)) for b in self._now()]
