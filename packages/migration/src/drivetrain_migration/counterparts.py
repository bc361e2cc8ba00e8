"""The names of Accelerate's documentation that drivetrain does not have, and the counterpart of each name.

Errors and the guide (docs/howto/from_accelerate.md) quote these texts word for word.
"""

from dataclasses import dataclass

from drivetrain.accelerator.foreign_names import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """A feature's spelling in drivetrain, and Accelerate's arguments, attributes and module names for the feature."""

    here: str  # the spelling in drivetrain, in one line
    arguments: str = ""
    attributes: str = ""
    names: str = ""

    def of(self, kind: Kind) -> list[str]:
        """Return Accelerate's names of one kind: arguments, attributes or names of modules."""
        return {"argument": self.arguments, "attribute": self.attributes, "name": self.names}[kind].split()


COUNTERPARTS: tuple[Counterpart, ...] = (
    Counterpart(
        arguments="split_batches dispatch_batches even_batches dataloader_config",
        attributes="split_batches dispatch_batches even_batches dataloader_config",
        names="DataLoaderConfiguration",
        here='`data={"split_batches": True, "dispatch": None, "even": "pad"}` of the Accelerator',
    ),
    Counterpart(
        arguments="use_seedable_sampler rng_types",
        attributes="use_seedable_sampler rng_types",
        names="RNGType",
        here="leave it out: every order is keyed by `seed=`, and checkpoints hold every generator",
    ),
    Counterpart(
        attributes="non_blocking use_stateful_dataloader",
        here="`data=` of the Accelerator: batches are copied ahead, and every prepared loader resumes",
    ),
    Counterpart(
        arguments="device_placement",
        attributes="device_placement",
        here="leave it out: `prepare` moves models, and batches arrive on `accelerator.device`; "
        "what is to stay where it is is not prepared",
    ),
    Counterpart(
        arguments="project_config",
        attributes="project_configuration project_dir logging_dir save_iteration",
        names="ProjectConfiguration",
        here='`project_dir=`, read back as `accelerator.settings.project_dir`; `sections={"checkpoint": '
        '{"keep_last": 3}}` for `total_limit`; checkpoints are in `project_dir/checkpoints`',
    ),
    Counterpart(
        arguments="kwargs_handlers",
        names="KwargsHandler DistributedDataParallelKwargs DDPCommunicationHookType",
        here='`sections={"ddp": {"find_unused_parameters": True}}` and the other fields of `ddp`',
    ),
    Counterpart(
        names="GradScalerKwargs",
        here='`sections={"precision": {"initial_scale": 1024.0}}` and the other fields of `precision`',
    ),
    Counterpart(
        names="InitProcessGroupKwargs",
        here='`sections={"state": {"timeout_seconds": 1800}}`',
    ),
    Counterpart(
        attributes="autocast_handler",
        names="AutocastKwargs",
        here="`accelerator.autocast(enabled=False)` around what is to stay in fp32",
    ),
    Counterpart(
        attributes="profile_handler",
        names="ProfileKwargs",
        here="`accelerator.profile(folder, record_shapes=True, with_stack=True, schedule=...)`",
    ),
    Counterpart(
        attributes="fp8_recipe_handler fp8_backend te_recipe_handler ao_recipe_handler",
        names="FP8RecipeKwargs TERecipeKwargs AORecipeKwargs MSAMPRecipeKwargs",
        here='`mixed_precision="fp8", fp8_recipe=TorchaoRecipe(scaling="rowwise")` of drivetrain_precision',
    ),
    Counterpart(
        arguments="fsdp_plugin",
        attributes="is_fsdp2",
        names="FullyShardedDataParallelPlugin",
        here='`backend="fsdp", sections={"fsdp": {"strategy": "full_shard", "wrap": ("Block",)}}`, always FSDP2',
    ),
    Counterpart(
        arguments="deepspeed_plugin deepspeed_plugins",
        attributes="deepspeed_plugin deepspeed_plugins deepspeed_engine_wrapped",
        names="DeepSpeedPlugin HfDeepSpeedConfig DummyOptim DummyScheduler",
        here='`backend="deepspeed", sections={"deepspeed": {"stage": 2}}`; the optimizer and the scheduler are '
        "torch's own, or `optimizer` in the file of `--deepspeed-config`",
    ),
    Counterpart(
        arguments="megatron_lm_plugin",
        names="MegatronLMPlugin",
        here='`backend="megatron"`, with sizes in `parallel` and a model of `megatron_from_transformers`',
    ),
    Counterpart(
        arguments="torch_tp_plugin parallelism_config",
        attributes="parallelism_config torch_device_mesh tensor_parallel_rank data_parallel_rank",
        names="TorchTensorParallelPlugin TorchContextParallelConfig ParallelismConfig",
        here="`parallelism=ParallelDims(...)`, read back as `accelerator.context.mesh`",
    ),
    Counterpart(
        arguments="dynamo_plugin dynamo_backend",
        names="TorchDynamoPlugin DynamoBackend",
        here="`torch.compile(model)` before or after `prepare`",
    ),
    Counterpart(
        arguments="gradient_accumulation_plugin",
        attributes="gradient_state",
        names="GradientAccumulationPlugin GradientState",
        here="`gradient_accumulation_steps=`; `accelerator.sync_gradients` says whether a window closes",
    ),
    Counterpart(
        arguments="step_scheduler_with_optimizer",
        attributes="step_scheduler_with_optimizer",
        here="leave it out: a prepared scheduler counts optimizer steps by itself",
    ),
    Counterpart(
        attributes="state",
        names="PartialState AcceleratorState",
        here="`accelerator.context`, or `drivetrain.connect()` without an Accelerator: passed on, never global",
    ),
    Counterpart(
        attributes="distributed_type multi_device",
        names="DistributedType",
        here='`accelerator.plan.facts["backend"]` and `["device"]` say what is applied; a script need not ask',
    ),
    Counterpart(
        names="LoggerType PrecisionType ComputeEnvironment SageMakerDistributedType",
        here='plain strings: `log_with="jsonl"`, `mixed_precision="bf16"`',
    ),
    Counterpart(
        names="GeneralTracker TensorBoardTracker WandBTracker on_main_process",
        here="`drivetrain.Tracker` is what a tracker fulfils, and an object of it goes into `log_with`; "
        "`accelerator.on_main_process` decorates",
    ),
    Counterpart(
        attributes="prepare_model prepare_data_loader prepare_optimizer prepare_scheduler",
        names="prepare_data_loader",
        here="`accelerator.prepare(one)`, which takes one object as well as many",
    ),
    Counterpart(
        attributes="unscale_gradients scaler",
        here="leave it out: `accelerator.clip_grad_norm_` and `clip_grad_value_` unscale first",
    ),
    Counterpart(
        attributes="trigger_sync_in_backward",
        here="`accelerator.accumulate(model, last=True)` closes the window with this micro-batch",
    ),
    Counterpart(
        attributes="lomo_backward",
        here="there is no LOMO here; `accelerator.backward(loss)`",
    ),
    Counterpart(
        attributes="verify_device_map",
        here="leave it out: a script need not ask whether a model is dispatched",
    ),
    Counterpart(
        attributes="save",
        names="save",
        here="`if accelerator.is_main_process: torch.save(obj, path)`",
    ),
    Counterpart(
        attributes="register_save_state_pre_hook register_load_state_pre_hook",
        here="`accelerator.register_checkpoint_hook(hook)` with a `drivetrain.CheckpointHook`",
    ),
    Counterpart(
        names="remove_hook_from_submodules remove_hook_from_module",
        here="`drivetrain.remove_hooks(model)`",
    ),
    Counterpart(
        names="load_and_quantize_model BnbQuantizationConfig",
        here="`load_checkpoint_and_dispatch(model, folder, ..., quantization=BitsAndBytes4Bit(...))`, "
        "from `drivetrain_dispatch`",
    ),
    Counterpart(
        names="set_module_tensor_to_device",
        here="`model.load_state_dict({name: value.to(device)}, strict=False, assign=True)`, before the model is "
        "dispatched",
    ),
    Counterpart(
        names="gather gather_object broadcast broadcast_object_list reduce pad_across_processes",
        here="an Accelerator's methods, or functions of `drivetrain_state` with `accelerator.context`",
    ),
    Counterpart(
        names="LocalSGD",
        here="`with accelerator.local_updates(model, every=8):` around the loop; the optimizer's steps count",
    ),
    Counterpart(
        names="prepare_pippy",
        here="`Accelerator(parallelism=ParallelDims(pipeline=2))` divides a model into stages, to train too",
    ),
    Counterpart(
        names="utils state logging tracking data_loader big_modeling scheduler optimizer",
        here="every public name is in `drivetrain` itself: `from drivetrain import set_seed, get_logger`",
    ),
)


def counterpart(kind: Kind, name: str) -> str | None:
    """Return the counterpart of an Accelerate name, for drivetrain's messages; None if the name is unknown."""
    return next((f"Accelerate's; here: {one.here}" for one in COUNTERPARTS if name in one.of(kind)), None)
