"""The names of Accelerate's documentation that drivetrain does not have, and the counterpart of each name.

Errors and the guide (docs/howto/from_accelerate.md) quote these texts word for word.
"""

from collections.abc import Mapping

from drivetrain.accelerator.foreign_names import Kind

# Accelerate's arguments (`name=`), attributes (`.name`) and names of modules, and the same feature's spelling here.
COUNTERPARTS: Mapping[str, str] = {
    "split_batches= dispatch_batches= even_batches= dataloader_config= .split_batches .dispatch_batches "
    ".even_batches .dataloader_config DataLoaderConfiguration": (
        '`data={"split_batches": True, "dispatch": None, "even": "pad"}` of the Accelerator'
    ),
    "use_seedable_sampler= rng_types= .use_seedable_sampler .rng_types RNGType": (
        "leave it out: every order is keyed by `seed=`, and checkpoints hold every generator"
    ),
    ".non_blocking .use_stateful_dataloader": (
        "`data=` of the Accelerator: batches are copied ahead, and every prepared loader resumes"
    ),
    "device_placement= .device_placement": (
        "leave it out: `prepare` moves models, and batches arrive on `accelerator.device`; what is to stay where "
        "it is is not prepared"
    ),
    "project_config= .project_configuration .project_dir .logging_dir .save_iteration ProjectConfiguration": (
        '`project_dir=`, read back as `accelerator.settings.project_dir`; `sections={"checkpoint": {"keep_last": '
        "3}}` for `total_limit`; checkpoints are in `project_dir/checkpoints`"
    ),
    "kwargs_handlers= KwargsHandler DistributedDataParallelKwargs DDPCommunicationHookType": (
        '`sections={"ddp": {"find_unused_parameters": True}}` and the other fields of `ddp`'
    ),
    "GradScalerKwargs": (
        '`sections={"precision": {"initial_scale": 1024.0}}` and the other fields of `precision`'
    ),
    "InitProcessGroupKwargs": '`sections={"state": {"timeout_seconds": 1800}}`',
    ".autocast_handler AutocastKwargs": (
        "`accelerator.autocast(enabled=False)` around what is to stay in fp32"
    ),
    ".profile_handler ProfileKwargs": (
        "`accelerator.profile(folder, record_shapes=True, with_stack=True, schedule=...)`"
    ),
    ".fp8_recipe_handler .fp8_backend .te_recipe_handler .ao_recipe_handler FP8RecipeKwargs TERecipeKwargs "
    "AORecipeKwargs MSAMPRecipeKwargs": (
        '`mixed_precision="fp8", fp8_recipe=TorchaoRecipe(scaling="rowwise")` of drivetrain_precision'
    ),
    "fsdp_plugin= .is_fsdp2 FullyShardedDataParallelPlugin": (
        '`backend="fsdp", sections={"fsdp": {"strategy": "full_shard", "wrap": ("Block",)}}`, always FSDP2'
    ),
    "deepspeed_plugin= deepspeed_plugins= .deepspeed_plugin .deepspeed_plugins .deepspeed_engine_wrapped "
    "DeepSpeedPlugin HfDeepSpeedConfig DummyOptim DummyScheduler": (
        '`backend="deepspeed", sections={"deepspeed": {"stage": 2}}`; the optimizer and the scheduler are '
        "torch's own, or `optimizer` in the file of `--deepspeed-config`"
    ),
    "megatron_lm_plugin= MegatronLMPlugin": (
        '`backend="megatron"`, with sizes in `parallel` and a model of `megatron_from_transformers`'
    ),
    "torch_tp_plugin= parallelism_config= .parallelism_config .torch_device_mesh .tensor_parallel_rank "
    ".data_parallel_rank TorchTensorParallelPlugin TorchContextParallelConfig ParallelismConfig": (
        "`parallelism=ParallelDims(...)`, read back as `accelerator.context.mesh`"
    ),
    "dynamo_plugin= dynamo_backend= TorchDynamoPlugin DynamoBackend": (
        "`torch.compile(model)` before or after `prepare`"
    ),
    "gradient_accumulation_plugin= .gradient_state GradientAccumulationPlugin GradientState": (
        "`gradient_accumulation_steps=`; `accelerator.sync_gradients` says whether a window closes"
    ),
    "step_scheduler_with_optimizer= .step_scheduler_with_optimizer": (
        "leave it out: a prepared scheduler counts optimizer steps by itself"
    ),
    ".state PartialState AcceleratorState": (
        "`accelerator.context`, or `drivetrain.connect()` without an Accelerator: passed on, never global"
    ),
    ".distributed_type .multi_device DistributedType": (
        '`accelerator.plan.facts["backend"]` and `["device"]` say what is applied; a script need not ask'
    ),
    "LoggerType PrecisionType ComputeEnvironment SageMakerDistributedType": (
        'plain strings: `log_with="jsonl"`, `mixed_precision="bf16"`'
    ),
    "GeneralTracker TensorBoardTracker WandBTracker on_main_process": (
        "`drivetrain.Tracker` is what a tracker fulfils, and an object of it goes into `log_with`; "
        "`accelerator.on_main_process` decorates"
    ),
    ".prepare_model .prepare_data_loader .prepare_optimizer .prepare_scheduler prepare_data_loader": (
        "`accelerator.prepare(one)`, which takes one object as well as many"
    ),
    ".unscale_gradients .scaler": (
        "leave it out: `accelerator.clip_grad_norm_` and `clip_grad_value_` unscale first"
    ),
    ".trigger_sync_in_backward": (
        "`accelerator.accumulate(model, last=True)` closes the window with this micro-batch"
    ),
    ".lomo_backward": "there is no LOMO here; `accelerator.backward(loss)`",
    ".verify_device_map": "leave it out: a script need not ask whether a model is dispatched",
    ".save save": "`if accelerator.is_main_process: torch.save(obj, path)`",
    ".register_save_state_pre_hook .register_load_state_pre_hook": (
        "`accelerator.register_checkpoint_hook(hook)` with a `drivetrain.CheckpointHook`"
    ),
    "remove_hook_from_submodules remove_hook_from_module": "`drivetrain.remove_hooks(model)`",
    "load_and_quantize_model BnbQuantizationConfig": (
        "`load_checkpoint_and_dispatch(model, folder, ..., quantization=BitsAndBytes4Bit(...))`, from "
        "`drivetrain_dispatch`"
    ),
    "set_module_tensor_to_device": (
        "`model.load_state_dict({name: value.to(device)}, strict=False, assign=True)`, before the model is "
        "dispatched"
    ),
    "gather gather_object broadcast broadcast_object_list reduce pad_across_processes": (
        "an Accelerator's methods, or functions of `drivetrain_state` with `accelerator.context`"
    ),
    "LocalSGD": (
        "`with accelerator.local_updates(model, every=8):` around the loop; the optimizer's steps count"
    ),
    "prepare_pippy": (
        "`Accelerator(parallelism=ParallelDims(pipeline=2))` divides a model into stages, to train too"
    ),
    "utils state logging tracking data_loader big_modeling scheduler optimizer": (
        "every public name is in `drivetrain` itself: `from drivetrain import set_seed, get_logger`"
    ),
}


def counterpart(kind: Kind, name: str) -> str | None:
    """Return the counterpart of an Accelerate name, for drivetrain's messages; None if the name is unknown."""
    word = {"argument": f"{name}=", "attribute": f".{name}", "name": name}[kind]
    found = (here for theirs, here in COUNTERPARTS.items() if word in theirs.split())
    return next((f"Accelerate's; here: {here}" for here in found), None)
