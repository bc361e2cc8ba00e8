"""The methods of an Accelerator for a training loop: accumulation windows, backward, clipping, autocast."""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.accelerator.prepare_methods import PrepareMethods
from drivetrain_accelerate.accelerator.run_options import checked_num_steps
from drivetrain_accelerate.loaders.loader_adapter import sharded_of
from drivetrain_accelerate.loaders.resume_checks import PassedBatches
from drivetrain_accelerate.plugins.kwargs_handlers import AutocastKwargs


class TrainingMethods(PrepareMethods):
    """The methods that a training loop calls for each micro-batch."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.step = 0  # micro-batches since the start or the end of a loader, as programs read it
        self._is_accumulating = False

    @property
    def sync_gradients(self) -> bool:
        """True if gradients are reduced and the optimizer steps with the current micro-batch."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step; a change applies from the next window on."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.num_steps = checked_num_steps(gradient_accumulation_steps)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None]:
        """Run the block as one micro-batch. Gradients are reduced and optimizers step when its window closes.

        An exception that leaves the block drops the gradients of the window so far; the loop may go on.
        """
        closes_at_end = self.gradient_state.sync_with_dataloader
        at_end = closes_at_end and self.gradient_state.end_of_dataloader
        self.follow_num_steps()
        window = self.inner.window
        window.is_open_ended, window.keeps_divisor = False, not self.is_strict
        self.step = 0 if at_end else self.step + 1
        try:
            # False leaves it to the number of micro-batches alone, None to the loaders as well.
            with self.inner.accumulate(*models, last=None if closes_at_end and not at_end else at_end):
                self.gradient_state.sync_gradients = self.inner.sync_gradients
                self.gradient_state.is_window_set = False
                self._is_accumulating = True
                yield
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.drop_gradients()
            raise
        finally:
            self._is_accumulating = False

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Run the block without reducing the gradients of a model."""
        return self.inner.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> None:
        """Raise a RuntimeError: a micro-batch must ask for the reduction before its forward."""
        raise RuntimeError(
            f"trigger_sync_in_backward({type(model).__name__}): a backward cannot be told to reduce gradients after "
            "its forward ran in no_sync(); run forward and backward of the last micro-batch outside no_sync()"
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Generator[None]:
        """Run a block of loops in which ranks may have different numbers of batches. Running loops do not change."""
        # Of `joinables` nothing is needed: drivetrain's loaders give all ranks equally many steps.
        with ExitStack() as stack:
            for loader in self._dataloaders if self.state.num_processes > 1 else ():
                if even_batches is not None and sharded_of(loader.sharded).current is None:
                    treated = sharded_of(loader.sharded).treating_tails("pad" if even_batches else "uneven")
                    stack.enter_context(treated)
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of a loss. Called on all ranks.

        The loss is the mean over this rank's micro-batch, of shape (). A window of several micro-batches takes the
        mean of their losses. If the program itself closes the window (see `GradientState`), losses are added as they
        are. Outside `accumulate` the loss is divided by the number of micro-batches in a step.

        Args:
            loss: The loss to accumulate.
            **kwargs: `retain_graph` and `inputs` on one device and under DDP; `create_graph` on one device; `model`
                if DeepSpeed trains several. `scale_wrt_gas` changes nothing. Other arguments are refused.

        Raises:
            ValueError: An argument is not supported.
            AccumulationError: The graph cannot be kept, as under FSDP and DeepSpeed.
            DataStateError: The program skips batches that a resumed loader has left out already.
            PairingError: The loss trains a model whose optimizer is not prepared, and other optimizers are, or the
                run divides its models or scales its losses.
        """
        kwargs.pop("scale_wrt_gas", None)
        model: nn.Module | None = kwargs.pop("model", None)
        graph = _graph_arguments(kwargs)
        passed: PassedBatches | None = getattr(self.gradient_state.active_dataloader, "passed_batches", None)
        if passed is not None:
            passed.check(self.gradient_state.num_steps)
        if not self.gradient_state.is_window_set:
            self.follow_num_steps()
        if self._leaves_steps_alone:
            # The program steps by itself, on torch's own gradients and their mean over ranks.
            divided = loss / self.gradient_state.num_steps
            if self.state.num_processes == 1:
                divided.backward(**graph)
            else:
                self.inner.backward_alone(divided, **graph)
        elif self.gradient_state.is_window_set:
            self._backward_in_window(loss, model, graph)
        elif self._is_accumulating or self.gradient_state.num_steps == 1 or self.state.divides_models:
            self.inner.backward(loss, model=model, **graph)
        else:
            # The program counts its micro-batches itself: each divided loss is a window that a step may follow.
            self.inner.window.keeps_divisor = True
            with self.inner.accumulate(last=True):
                self.inner.backward(loss, model=model, **graph)

    @property
    def _leaves_steps_alone(self) -> bool:
        """True if no optimizer was prepared together with its model, and each rank holds whole gradients.

        The program then steps by itself, and losses must not be divided or scaled.
        """
        are_waiting = all(each.is_waiting for each in self._optimizers)
        return are_waiting and not self.state.divides_models and not self.state.scales_loss

    def _backward_in_window(self, loss: Tensor, model: nn.Module | None, graph: dict[str, Any]) -> None:
        """Add the gradients of a loss to a window that the program itself opens and closes."""
        gradients, window = self.gradient_state, self.inner.window
        is_first = window.closing
        if is_first:
            window.is_open_ended = True
        is_alone = is_first and gradients.sync_gradients
        with self.inner.accumulate(last=gradients.sync_gradients):
            # Several losses are a sum, whose mean over the ranks is taken: the first stands for one item of its rank.
            count = None if is_alone else float(is_first)
            self.inner.backward(loss, count=count, model=model, **graph)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Raise a RuntimeError under fp16: clipping or the optimizer's step unscales the gradients."""
        if self.state.scales_loss:
            raise RuntimeError(
                "unscale_gradients(): gradients are unscaled by clip_grad_norm_(), clip_grad_value_() and step(); "
                "call one of these, and read the gradients after it"
            )

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients' global norm once the window is closed. Called on all ranks.

        Returns:
            The norm before clipping, of shape (). An open window clips nothing, and returns the norm of this rank's
            gradients so far.

        Raises:
            ValueError: No prepared model trains the parameters.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._leaves_steps_alone:
            return nn.utils.clip_grad_norm_(chosen, max_norm, float(norm_type))
        norm = self.inner.clip_grad_norm_(chosen, max_norm, float(norm_type))
        if norm is not None:
            return norm
        scale = self.inner.loss_scale_state() if self.state.scales_loss else None
        gradients = [each.grad for each in chosen if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients, float(norm_type))
        return norm if scale is None else norm / scale["scale"]

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value] once the window is closed."""
        if self._leaves_steps_alone:
            nn.utils.clip_grad_value_(parameters, clip_value)
            return
        self.inner.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer's last step was skipped because a gradient was not finite."""
        return self._inner is not None and self.inner.optimizer_step_was_skipped

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block in the run's precision, as prepared models do by themselves."""
        handler = autocast_handler or self.options.handlers.autocast or AutocastKwargs()
        return self.inner.autocast(enabled=handler.enabled, cache_enabled=handler.cache_enabled)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Run the block as it is: prepared models divide sequences themselves, and return whole outputs."""
        return nullcontext()

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Raise a NotImplementedError: no backend supports LOMO's optimizers, which step inside their backward."""
        raise NotImplementedError(
            f"lomo_backward(learning_rate={learning_rate}): use an optimizer that steps after backward; to save the "
            "memory of gradients, shard the model (FSDP) or offload the optimizer"
        )


def _graph_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments if torch's `backward` takes them; refuse other arguments."""
    if unknown := sorted(set(given) - {"retain_graph", "create_graph", "inputs"}):
        raise ValueError(
            f"backward({', '.join(unknown)}=): say the loss, of shape (), model= for one of several, and torch's "
            "retain_graph=, create_graph= and inputs="
        )
    inputs = given.get("inputs")
    create_graph = bool(given.get("create_graph"))
    return {
        "retain_graph": bool(given.get("retain_graph")) or create_graph,
        "create_graph": create_graph,
        "inputs": (inputs,) if isinstance(inputs, Tensor) else inputs,
    }
