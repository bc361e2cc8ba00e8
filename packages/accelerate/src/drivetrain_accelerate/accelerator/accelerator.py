"""The Accelerator of Accelerate's interface: its arguments, and the classes that its methods come from."""

from dataclasses import replace
from os import PathLike
from typing import Any

import torch.distributed as dist

from drivetrain_accelerate.accelerator.checkpoint_methods import CheckpointMethods
from drivetrain_accelerate.accelerator.rank_methods import RankMethods
from drivetrain_accelerate.accelerator.result_methods import ResultMethods
from drivetrain_accelerate.accelerator.run_options import (
    RunOptions,
    accumulation_of,
    chosen_precision,
    sort_handlers,
)
from drivetrain_accelerate.accelerator.training_methods import TrainingMethods
from drivetrain_accelerate.plain_values import shown
from drivetrain_accelerate.plugins.enums import FP8BackendType, LoggerType, PrecisionType, RNGType
from drivetrain_accelerate.plugins.fp8_recipes import check_fp8_precision
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler, TorchDynamoPlugin, check_group
from drivetrain_accelerate.plugins.option_fields import with_known_fields
from drivetrain_accelerate.plugins.run_configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.partial_state import asks_for_cpu, is_initialized
from drivetrain_accelerate.training.loss_scale import LossScaleView, check_scaler
from drivetrain_precision import TransformerEngineRecipe
from drivetrain_state import best_device_kind

NOT_SAID = object()
NO_MEGATRON = (
    "megatron_lm_plugin=: programs for its engine do not run; drivetrain's own backend='megatron' trains Megatron's "
    "models by a usual loop, and fsdp_plugin= models of the same sizes as they are"
)


@with_known_fields
class Accelerator(TrainingMethods, CheckpointMethods, ResultMethods, RankMethods):
    """The object between a training loop and the hardware, in Accelerate's words. Called on all ranks.

    `device_placement` and `rng_types` change nothing: drivetrain always places models and batches, and the order of
    data needs no generator to be synchronised. Tensor parallelism and Megatron are refused.

    Raises:
        ValueError: A value is unknown, two arguments contradict each other, or another Accelerator of this process
            has another precision.
        NotImplementedError: A plugin asks for a feature that drivetrain does not have yet.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = NOT_SAID,  # pyright: ignore[reportArgumentType] as in Accelerate: not said
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | list[Any] | Any = None,
        project_dir: str | PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        deepspeed_plugin = deepspeed_plugin if deepspeed_plugins is None else deepspeed_plugins
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ValueError("dynamo_plugin= and dynamo_backend=: give only one of them")
        if megatron_lm_plugin is not None:
            raise NotImplementedError(NO_MEGATRON)
        data = dataloader_config or DataLoaderConfiguration()
        if split_batches is not NOT_SAID:
            data = replace(data, split_batches=split_batches)  # the program's own stays as it is
        project = project_config or ProjectConfiguration()
        if project_dir is not None and project.project_dir is None:
            project.set_directories(str(project_dir))
        options = RunOptions(
            mixed_precision=chosen_precision(mixed_precision),
            cpu=cpu,
            data=data,
            project=project,
            accumulation=accumulation_of(gradient_accumulation_steps, gradient_accumulation_plugin),
            handlers=sort_handlers(kwargs_handlers),
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            dynamo_plugin=dynamo_plugin
            if dynamo_backend is None
            else TorchDynamoPlugin(backend=dynamo_backend),
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            log_with=log_with if isinstance(log_with, list) else [log_with] if log_with else [],
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        )
        super().__init__(options, _share_state(options))
        check_fp8_precision(options.handlers.fp8, self.state.mixed_precision)
        self.device_placement = device_placement
        self.rng_types = rng_types or ["generator"]
        self.project_configuration = project
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._idle_scaler: Any = None

    mixed_precision: str = shown("state.mixed_precision", "The precision of forward and backward.")

    @property
    def scaler(self) -> Any:
        """The loss scale under fp16, to be saved and loaded; None in other precisions and under DeepSpeed.

        In a run without a loss scale, a program may set a GradScaler with enabled=False, and reads it here again.
        """
        return self._idle_scaler if (own := self._loss_scale()) is None else own

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        check_scaler(scaler, is_scaled=self._loss_scale() is not None)
        self._idle_scaler = scaler

    def _loss_scale(self) -> LossScaleView | None:
        if not self.state.scales_loss or self.deepspeed_plugin is not None:
            return None
        return LossScaleView(lambda: self.inner, self.options.handlers.scaler)

    deepspeed_plugin: Any = shown("state.deepspeed_plugin", "The selected plugin of DeepSpeed, if any.")
    is_fsdp2: bool = shown("state.is_fsdp2", "True if models are sharded, which is always by FSDP2.")
    parallelism_config: Any = shown("state.parallelism_config", "The parallel dimensions; None without.")
    torch_device_mesh: Any = shown("state.device_mesh", "The mesh of the parallel dimensions, if any.")

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if several parallel dimensions are combined."""
        return self.parallelism_config is not None

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's replica of the model."""
        sizes = self._dimensions("data_parallel_rank")
        return self.process_index // (sizes.total_size // sizes.dp_replicate_size)

    @property
    def data_parallel_shard_rank(self) -> int:
        """The number of this rank among the ranks that divide one replica."""
        sizes = self._dimensions("data_parallel_shard_rank")
        return self.process_index // sizes.non_data_parallel_size % sizes.dp_shard_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The number of this rank among the ranks that split a matrix, which are neighbours."""
        return self.process_index % self._dimensions("tensor_parallel_rank").tp_size

    @property
    def pipeline_parallel_rank(self) -> int:
        """Raise a NotImplementedError, as Accelerate does: a ParallelismConfig has no such dimension."""
        raise NotImplementedError("pipeline_parallel_rank: ask inner.context.ranks('pipeline').index")

    @property
    def context_parallel_rank(self) -> int:
        """Raise a NotImplementedError, as Accelerate does."""
        raise NotImplementedError("context_parallel_rank: ask torch_device_mesh['cp'].get_local_rank()")

    def _dimensions(self, asked: str) -> Any:
        if self.parallelism_config is None:
            raise RuntimeError(
                f"{asked}: this run has no parallel dimensions; say Accelerator(parallelism_config=...), or ask "
                "process_index for the rank among all"
            )
        return self.parallelism_config

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8."""
        if self.mixed_precision != "fp8":
            return FP8BackendType.NO
        is_engine = isinstance(self.inner.fp8_recipe, TransformerEngineRecipe)
        return FP8BackendType.TE if is_engine else FP8BackendType.AO

    # Programs set these two between the loaders that they prepare.
    dataloader_config: DataLoaderConfiguration = shown(
        "options.data", "The division of the loaders that are prepared from here on.", is_settable=True
    )
    even_batches: bool = shown("options.data.even_batches", "True if tails are filled.", is_settable=True)
    split_batches: bool = shown("options.data.split_batches", "True if batch sizes are sums over processes.")
    dispatch_batches: bool | None = shown("options.data.dispatch_batches", "True if rank 0 reads for all.")

    # The order of drivetrain's loaders always follows from a seed and the epoch, and they always have `state_dict`.
    use_seedable_sampler: bool = shown("options.data.use_seedable_sampler", "As the program has said.")
    use_stateful_dataloader: bool = shown("options.data.use_stateful_dataloader", "As the program has said.")
    non_blocking: bool = shown("options.data.non_blocking", "True if pinned copies do not wait.")
    project_dir: str | None = shown("project_configuration.project_dir", "The folder of the run.")
    logging_dir: str | None = shown("project_configuration.logging_dir", "The folder of logs.")
    save_iteration: int = shown("project_configuration.iteration", "The number of the next checkpoint.")


def _share_state(options: RunOptions) -> AcceleratorState:
    """Return the state that all Accelerators of a process share. The options of the first Accelerator set it."""
    group = {}
    init = options.handlers.init
    if init is not None and not is_initialized() and not dist.is_initialized():
        check_group(init, "cpu" if options.cpu or asks_for_cpu() else best_device_kind())
        group = {} if init.timeout is None else {"timeout": init.timeout}
    return AcceleratorState(
        options.mixed_precision,
        options.cpu,
        dynamo_plugin=options.dynamo_plugin,
        deepspeed_plugin=options.deepspeed_plugin,
        fsdp_plugin=options.fsdp_plugin,
        torch_tp_plugin=options.torch_tp_plugin,
        parallelism_config=options.parallelism_config,
        _from_accelerator=True,
        **group,
    )
