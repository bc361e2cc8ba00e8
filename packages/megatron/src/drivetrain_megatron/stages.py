"""Models of Megatron's in stages: what each rank holds of the whole, and a batch trained by Megatron's schedule."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain_backends.composed.stage_layout import StageLayout
from drivetrain_backends.composed.staged_prepared import PieceLosses, StagedPrepared
from drivetrain_backends.composed.stages import KeepStages, StagedModel, cut_batch, num_samples
from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.modules.compile import strip_wrapper_prefix, unwrap_compiled
from drivetrain_backends.modules.replicated_weights import checksum
from drivetrain_megatron.library import TransformerBlock, forward_backward_pipelining_without_interleaving
from drivetrain_precision import Policy
from drivetrain_state import Context, gather_object
from drivetrain_state.collectives.nested import leaves_with_paths


class StageEnds(BaseException):
    """The forward of a stage has ended within a loss function, which only the last stage goes on with.

    It is no Exception, so that no handler of the function's own takes it for an error.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__("a stage of a pipeline has computed its output")
        self.output = output


class NumberedLayers(nn.ModuleList):
    """The layers of a stage, named by their places in the whole model, and indexed by those in the stage."""

    def __init__(self, layers: nn.ModuleList, first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, start=first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        """Return a layer by its place in this stage."""
        return list(self)[index]


class BuiltStages(KeepStages):
    """Models that are built in stages: find which rank holds what, and let a forward run in `train_step` alone.

    Attributes:
        is_training: Whether a batch's micro-batches are being trained.
    """

    def __init__(self, context: Context, policy: Policy) -> None:
        super().__init__(context)
        self.is_training = False
        self._sent_dtype = policy.autocast_dtype
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        if (given := self._settings.pipeline_schedule) not in (None, "1f1b"):
            raise ValueError(
                f"parallel.pipeline_schedule={given!r} under backend='megatron': its schedule is 1f1b; leave it out"
            )
        for name in ("pipeline_splits", "pipeline_last"):
            if getattr(self._settings, name):
                raise ValueError(f"parallel.{name}: Megatron's models are built in stages; leave it out")

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse a tied embedding, which two stages would hold under two names."""
        del optimizers
        for model in models:
            if getattr(unwrap_compiled(model), "share_embeddings_and_output_weights", False):
                raise ValueError(
                    f"{type(model).__name__} has one weight for embedding and head, of which the first and last of "
                    f"{self._ranks.size} stages would each train one: train it with parallel.pipeline left out"
                )

    def apply(self, model: nn.Module) -> nn.Module:
        """Name layers by their places in the whole model. Called on all ranks."""
        inner = unwrap_compiled(model)
        number_layers(inner)
        staged = StagedModel(inner)
        own = [strip_wrapper_prefix(name) for name, value in inner.state_dict().items() if value is not None]
        held: list[list[str]] = gather_object(self._context, own, over="pipeline")
        staged.names = tuple(dict.fromkeys(name for names in held for name in names))
        staged.holders = {
            name: tuple(rank for rank, names in enumerate(held) if name in names) for name in staged.names
        }
        self._handles[model] = [
            inner.register_forward_pre_hook(self._check_training),
            inner.register_forward_hook(self._end_stage),
        ]
        config: Any = inner.config
        config.pipeline_dtype = self._sent_dtype or next(inner.parameters()).dtype
        self.models[inner] = staged
        self._shown[type(inner).__name__] = f"{self._ranks.size} stages, of Megatron's"
        return model

    def release(self, model: nn.Module) -> None:
        """Let a forward run outside of `train_step` again; the model stays one stage."""
        for handle in self._handles.pop(model, ()):
            handle.remove()

    def _check_training(self, model: nn.Module, args: Any) -> None:
        del args
        if not self.is_training:
            raise AccumulationError(
                f"{type(model).__name__} under parallel.pipeline={self._ranks.size} has one stage here, which takes "
                "another's output: call accelerator.train_step(batch, loss=lambda model, batch: ...)"
            )

    def _end_stage(self, model: Any, args: Any, output: Any) -> None:
        del args
        if self._ranks.index < self._ranks.size - 1:
            raise StageEnds(output.to(model.config.pipeline_dtype))  # as the next stage receives it


def number_layers(model: nn.Module) -> None:
    """Name the layers of Megatron's blocks by their places in the whole model, so that names differ among stages."""
    for block in model.modules():
        if isinstance(block, TransformerBlock) and len(block.layers):
            first: Any = block.layers[0]
            block.layers = NumberedLayers(block.layers, first.layer_number - 1)


class BuiltStageLayout(StageLayout):
    """The layout of models that are built in stages, whose optimizers hold the parameters of a stage alone."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer's state listed in the order of the whole model."""
        order = {
            parameter: staged.names.index(name)
            for model, staged in self._stages.models.items()
            for name, parameter in self.parameters(model).items()
        }
        self._places[optimizer] = [
            [order[parameter] for parameter in group["params"]] for group in optimizer.param_groups
        ]
        self._inner.adopt(optimizer)


class ScheduledPrepared(StagedPrepared):
    """A model in stages whose batches Megatron's schedule trains."""

    _has_compared = False  # whether the stages were found to read the same batch, the first

    def train_pieces(self, batch: Any, loss: Callable[[Any, Any], Any], model: Any) -> Tensor:
        """Run forward and backward of a batch, in equal micro-batches; see `SupportsPieces`. Called on all ranks."""
        stages, tracker = self._stages, self._tracker
        assert isinstance(stages, BuiltStages)
        rows = num_samples(batch)
        if not self._has_compared:
            check_same_batch(batch, self._context)
            self._has_compared = True
        number = max(n for n in range(1, min(rows, stages.num_pieces) + 1) if rows % n == 0)
        cuts = cut_batch(batch, number)
        losses = PieceLosses(
            [share for _, share in cuts], tracker.begin_pieces(self.group), self._context.device
        )
        scaler = self._gradients.scaler

        def forward(pieces: Iterator[tuple[int, Any]], _: Any) -> tuple[Tensor, Any]:
            at, piece = next(pieces)
            try:
                found = loss(model, piece)
            except StageEnds as ended:
                return ended.output, None
            value = losses.root(at, found)
            value = value if scaler is None else scaler.scale(value)
            # The schedule divides by the number of micro-batches, which the losses' window does as well.
            return value * number, as_it_is

        stages.is_training = True
        try:
            with self.no_sync():  # replicas are averaged when the window closes
                forward_backward_pipelining_without_interleaving(
                    forward_step_func=forward,
                    data_iterator=enumerate(piece for piece, _ in cuts),
                    model=self.unwrap(),
                    num_microbatches=number,
                    seq_length=sequence_length(batch, rows),
                    micro_batch_size=rows // number,
                )
        finally:
            stages.is_training = tracker.in_backward = False
        ranks = self._context.ranks("pipeline")
        dist.broadcast(losses.sums, ranks.ranks[-1], group=ranks.process_group)
        total, count = losses.sums
        tracker.end_pieces(self.group, count)
        return total


def as_it_is(loss: Tensor) -> tuple[Tensor, None]:
    """Return what a schedule's function of the loss returns: the loss, and nothing to report."""
    return loss, None


def sequence_length(batch: Any, rows: int) -> int:
    """Return the length of a batch's sequences: that of its tensors of (rows, length).

    Raises:
        ValueError: There is none, or several lengths.
    """
    tensors = (leaf for _, leaf in leaves_with_paths(batch) if isinstance(leaf, Tensor))
    lengths = {one.shape[1] for one in tensors if one.dim() == 2 and len(one) == rows}
    if len(lengths) != 1:
        raise ValueError(
            f"the batch holds sequences of {sorted(lengths) or 'no length'}: stages send activations of one length; "
            "give tensors of (rows, length), all as long"
        )
    return lengths.pop()


def check_same_batch(batch: Any, context: Context) -> None:
    """Refuse a batch that differs among the stages: the last would hold other labels than the first has tokens."""
    tensors = [leaf for _, leaf in leaves_with_paths(batch) if isinstance(leaf, Tensor)]
    own = [(tuple(one.shape), int(checksum(one))) for one in tensors]
    if any(other != own for other in gather_object(context, own, over="pipeline")):
        ranks = ", ".join(map(str, context.ranks("pipeline").ranks))
        raise ValueError(
            f"ranks {ranks} hold the stages of one model, and were given different batches: prepare() the loader, "
            "which gives these ranks the same batches, or read the same on all of them"
        )
