"""The methods of an Accelerator inside a training loop: windows, backward, clipping, autocast."""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.accelerator.composed_run import ComposedRun
from drivetrain_accelerate.plugins.kwargs_handlers import AutocastKwargs


class TrainingMethods(ComposedRun):
    """The part of an Accelerator that a training loop calls for each micro-batch."""

    @property
    def sync_gradients(self) -> bool:
        """True if gradients are reduced and the optimizer steps with the current micro-batch."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step; it applies from the next window on."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.num_steps = gradient_accumulation_steps

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None]:
        """Run a micro-batch: gradients are reduced and optimizers step when its window closes.

        Args:
            *models: The models trained in it.
        """
        at_end = self.gradient_state.sync_with_dataloader and self.gradient_state.end_of_dataloader
        self.follow_num_steps()
        self.inner.window.is_open_ended = False
        with self.inner.accumulate(*models, last=at_end or None):
            self.gradient_state.sync_gradients = self.inner.sync_gradients
            self.gradient_state.is_window_set = False
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Run the block without reducing the gradients of a model."""
        with self.inner.no_sync(model):
            yield

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> None:
        """Refuse: which backward reduces gradients is decided before its forward.

        Raises:
            RuntimeError: Raised by every call.
        """
        raise RuntimeError(
            f"trigger_sync_in_backward({type(model).__name__}): a backward cannot be told to reduce gradients after "
            "its forward ran in no_sync(); run forward and backward of the last micro-batch outside no_sync()"
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Generator[None]:
        """Run a loop in which ranks may have different numbers of batches.

        Args:
            joinables: The models trained in it.
            even_batches: Whether the loaders fill their tails; None leaves them as they are.
        """
        del joinables, even_batches  # drivetrain's loaders give all ranks equally many steps
        yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of a loss. Called on all ranks.

        Args:
            loss: The mean over this rank's micro-batch, of shape (). In a window of several micro-batches the mean
                over them is taken, unless the program itself says which of them closes the window (see
                `GradientState`): then its losses are added as they are.
            **kwargs: `model`, whose loss it is: said where DeepSpeed trains several. `scale_wrt_gas` concerns
                DeepSpeed's own division and changes nothing here. Others, such as the `learning_rate` of LOMO's
                optimizers, are refused.

        Raises:
            ValueError: An argument is not supported.
        """
        kwargs.pop("scale_wrt_gas", None)
        model: nn.Module | None = kwargs.pop("model", None)
        if kwargs:
            raise ValueError(f"backward({', '.join(kwargs)}=): say the loss, and model= if there are several")
        gradients = self.gradient_state
        if not gradients.is_window_set:
            self.follow_num_steps()
            self.inner.backward(loss, model=model)
            return
        window = self.inner.window
        is_first = window.closing
        if is_first:
            window.is_open_ended = True
        is_alone = is_first and gradients.sync_gradients
        with self.inner.accumulate(last=gradients.sync_gradients):
            # Several losses are a sum, whose mean over the ranks is taken: the first stands for one item of its rank.
            self.inner.backward(loss, count=None if is_alone else float(is_first), model=model)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Refuse: gradients are unscaled by the clip or step of a closed window, once.

        Raises:
            RuntimeError: The run scales its loss.
        """
        del optimizer
        if self.state.mixed_precision == "fp16":
            raise RuntimeError(
                "unscale_gradients(): gradients are unscaled by clip_grad_norm_(), clip_grad_value_() and step(); "
                "call one of these, and read the gradients after it"
            )

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradients' global norm once the window is closed, and return it. Called on all ranks."""
        return self.inner.clip_grad_norm_(parameters, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value] once the window is closed."""
        self.inner.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer's last step was skipped because a gradient was not finite."""
        return self._inner is not None and self.inner.optimizer_step_was_skipped

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block in the run's precision, as prepared models do by themselves."""
        handler = autocast_handler or self.options.handlers.autocast or AutocastKwargs()
        return self.inner.autocast(enabled=handler.enabled, cache_enabled=handler.cache_enabled)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Generator[None]:
        """Run the block as it is: the run has no context parallel dimension."""
        del buffers, buffer_seq_dims, no_restore_buffers
        yield

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refuse: LOMO's optimizers step inside their backward, which no backend of drivetrain supports.

        Raises:
            NotImplementedError: Raised by every call.
        """
        del loss
        raise NotImplementedError(
            f"lomo_backward(learning_rate={learning_rate}): use an optimizer that steps after backward; to save the "
            "memory of gradients, shard the model (FSDP) or offload the optimizer"
        )
