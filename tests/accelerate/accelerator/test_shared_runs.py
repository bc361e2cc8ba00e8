"""Several Accelerators of one process, and what a launch says, beside the real Accelerate where it can run it."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.accelerator.composition import plan_composition
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.installation import told_variables
from drivetrain_accelerate.plugins import fp8_recipes, kwargs_handlers
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain_accelerate.plugins.kwargs_handlers import AutocastKwargs, InitProcessGroupKwargs
from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig
from drivetrain_accelerate.plugins.parallelism_handlers import TorchTensorParallelPlugin
from drivetrain_accelerate.plugins.run_configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_config import Layers, environ
from optional_modules import skip_without

accelerate: Any = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_states() -> Iterator[None]:
    yield
    forget()


REPLACED = "as in Accelerate, save_state replaces the checkpoint in its folder"


def forget() -> None:
    for states in (AcceleratorState, accelerate.state.AcceleratorState):
        states._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    for gradients in (GradientState, accelerate.state.GradientState):
        gradients._reset_state()  # pyright: ignore[reportPrivateUsage]


class Noting(torch.nn.Module):
    """A layer that notes the dtype in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        self.seen.append(outputs.dtype)
        return outputs


def sources_of(accelerator: Accelerator) -> dict[str, str]:
    """Return the source of each setting that was said, as the plan of the run shows it."""
    rows = accelerator.inner.plan.rows
    return {row.setting: row.source for row in rows if row.source != "default"}


def test_the_plan_says_who_chose_what_the_program_has_not_written() -> None:
    loaders = DataLoaderConfiguration(non_blocking=True)
    with environ.exported(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4", DRIVETRAIN_CHECKPOINT__KEEP_LAST="3"):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", dataloader_config=loaders)
        assert sources_of(accelerator) == {
            "run.mixed_precision": "code",
            "run.gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment",
            "run.cpu": "code",
            "state.device": "code",
            "precision.output_dtype": "Accelerate's default",
            "data.non_blocking": "code",
            "checkpoint.keep_last": "DRIVETRAIN_CHECKPOINT__KEEP_LAST in the environment",
        }
    forget()
    with environ.exported(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_USE_CPU="yes"):
        found = sources_of(Accelerator(gradient_accumulation_steps=2))
    assert found["run.mixed_precision"] == "ACCELERATE_MIXED_PRECISION in the environment"
    assert found["run.cpu"] == found["state.device"] == "ACCELERATE_USE_CPU in the environment"
    assert found["run.gradient_accumulation_steps"] == "code"
    assert found["data.non_blocking"] == "Accelerate's default"
    assert found["checkpoint.keep_last"] == REPLACED


def test_the_plan_is_in_the_folder_of_the_logs(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    Accelerator(cpu=True, project_config=project).prepare(torch.nn.Linear(1, 1))
    stored = json.loads((tmp_path / "logs" / "plan.json").read_text())["settings"]
    assert stored["checkpoint.keep_last"]["source"] == REPLACED
    assert not (tmp_path / "plan.json").exists()


def test_the_plan_says_which_settings_are_a_plugins() -> None:
    skip_without("deepspeed")
    plugin = DeepSpeedPlugin(
        hf_ds_config={"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    )
    options = RunOptions(accumulation=GradientAccumulationPlugin(num_steps=2))
    settings = plan_composition(options, deepspeed_plugin=plugin, num_processes=1).entries()
    asked = [settings["run"]["backend"], settings["run"]["gradient_accumulation_steps"]]
    assert {str(each.source) for each in (*asked, settings["deepspeed"]["config"])} == {
        "the DeepSpeed plugin"
    }
    sharded = RunOptions(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    settings = plan_composition(sharded, deepspeed_plugin=None, num_processes=2).entries()
    assert {str(each.source) for each in settings["fsdp"].values()} == {"the FSDP plugin"}


@pytest.mark.parametrize("kind", [Accelerator, accelerate.Accelerator])
def test_a_second_accelerator_computes_in_the_precision_that_it_reports(kind: Any) -> None:
    kind(cpu=True, mixed_precision="bf16")
    second = kind()
    model = Noting()
    second.prepare(model)(torch.ones(1, 2))
    assert second.mixed_precision == "bf16"
    assert model.seen == [torch.bfloat16]


def is_sharded(model: torch.nn.Module) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def test_a_second_accelerator_shards_as_it_reports() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    Accelerator(cpu=True, fsdp_plugin=plugin)
    second = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))  # the same options
    assert second.distributed_type == DistributedType.FSDP
    assert is_sharded(second.prepare(torch.nn.Linear(2, 1)))
    plugin.auto_wrap_policy = None  # programs change their plugins
    Accelerator(fsdp_plugin=plugin)
    with pytest.raises(ValueError, match="the first Accelerator of this process has none"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())
    second.end_training()


def windows_of_two_accelerators(kind: Any) -> tuple[list[int], list[bool]]:
    first = kind(cpu=True, gradient_accumulation_steps=2)
    layer = torch.nn.Linear(2, 1)
    model, _ = first.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    second = kind(gradient_accumulation_steps=4)
    synced: list[bool] = []
    for _ in range(8):
        with first.accumulate(model):
            first.backward(model(torch.ones(1, 2)).sum())
            synced.append(first.sync_gradients)
    return [each.gradient_accumulation_steps for each in (first, second)], synced


def test_the_last_accelerator_says_the_number_of_micro_batches_for_all() -> None:
    ours = windows_of_two_accelerators(Accelerator)
    forget()
    assert ours == windows_of_two_accelerators(accelerate.Accelerator)
    assert ours == ([4, 4], [False, False, False, True] * 2)


def test_a_launch_with_fsdp_is_in_the_state() -> None:
    with environ.exported(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="false"):
        accelerator = Accelerator(cpu=True)
        assert is_sharded(accelerator.prepare(torch.nn.Linear(2, 1)))
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.state.fsdp_plugin.reshard_after_forward is False
    assert "shard_grad_op" in str(accelerator.inner.plan)
    accelerator.end_training()


def test_a_launch_with_deepspeed_is_in_the_state() -> None:
    with environ.exported(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="1"):
        accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.deepspeed_plugin.zero_stage == 1


def test_what_drivetrains_settings_say_comes_before_accelerates_variables() -> None:
    with environ.exported(ACCELERATE_USE_FSDP="true", DRIVETRAIN_RUN__BACKEND="single"):
        assert Accelerator(cpu=True).state.fsdp_plugin is None


@pytest.mark.slow  # DeepSpeed may build its communication first
@pytest.mark.parametrize(
    ("backend", "file"),
    [
        ("ACCELERATE_USE_DEEPSPEED=true", "ACCELERATE_DEEPSPEED_CONFIG_FILE"),  # Accelerate's own launcher
        ("DRIVETRAIN_RUN__BACKEND=deepspeed", "DRIVETRAIN_DEEPSPEED__CONFIG"),  # drivetrain's, as settings
    ],
)
def test_a_bare_accelerator_accumulates_as_the_launchs_deepspeed_file_says(
    tmp_path: Path, backend: str, file: str
) -> None:
    skip_without("deepspeed")
    path = tmp_path / "zero.json"
    path.write_text('{"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}')
    name, _, word = backend.partition("=")
    with environ.exported(**{name: word, file: str(path)}):
        # The second is what a launch with drivetrain's settings tells an interface.
        with environ.exported(**told_variables(Layers.of_process())):
            accelerator = Accelerator(cpu=True)
            assert accelerator.inner.window.next_num_micro_batches == 4
    assert accelerator.gradient_accumulation_steps == 4
    assert sources_of(accelerator)["run.gradient_accumulation_steps"] == "the DeepSpeed plugin"
    accelerator.end_training()


def sharding_on_each_rank(variables: dict[str, str], dimensions: dict[str, Any]) -> tuple[str, str, bool]:
    parallelism = ParallelismConfig(**dimensions) if dimensions else None
    with environ.exported(**variables):
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
    found = (
        accelerator.distributed_type.value,
        type(accelerator.state.fsdp_plugin).__name__,
        is_sharded(model),
    )
    accelerator.free_memory()
    forget()
    return found


SHARDED, REPLICATED = ("FSDP", "FullyShardedDataParallelPlugin", True), ("MULTI_CPU", "NoneType", False)


def divided_training(sizes: dict[str, int]) -> tuple[tuple[int, ...], list[float]]:
    """Train with the dimensions; the shape of this rank's part of the first weight, and the losses."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    losses: list[float] = []
    for _ in range(4):
        loss = (model(torch.ones(2, 4).double()) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    shape = tuple(accelerator.unwrap_model(model)[0].weight.shape)
    accelerator.free_memory()
    forget()
    return shape, losses


def test_ranks_divide_layers_as_the_dimensions_say(run_ranks: Any) -> None:
    [(whole, expected)] = run_ranks(divided_training, {}, num_processes=1)
    assert whole == (6, 4)
    for shape, losses in run_ranks(divided_training, {"tp_size": 2}):
        assert shape == (3, 4)
        assert losses == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "dimensions", "expected"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, {}, SHARDED),
        ({"DRIVETRAIN_RUN__BACKEND": "fsdp"}, {}, SHARDED),
        ({}, {"dp_shard_size": 2}, SHARDED),
        ({}, {"dp_replicate_size": 2}, REPLICATED),
    ],
)
def test_ranks_shard_or_replicate_as_the_launch_or_the_dimensions_say(
    run_ranks: Any, variables: dict[str, str], dimensions: dict[str, Any], expected: tuple[str, str, bool]
) -> None:
    assert run_ranks(sharding_on_each_rank, variables, dimensions) == [expected] * 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"torch_tp_plugin": TorchTensorParallelPlugin(), "parallelism_config": ParallelismConfig()},
            r"leave it out, and say .*\(tp_size=",
        ),
        (
            {"megatron_lm_plugin": object()},
            "^megatron_lm_plugin=: programs for its engine do not run",
        ),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "is 2, and there are 1 processes"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(backend="mpi")]}, "communicate by gloo"),
        ({"project_config": ProjectConfiguration(save_on_each_node=True)}, "all nodes see"),
        ({"project_config": ProjectConfiguration(total_limit=2)}, "automatic_checkpoint_naming=True"),
        (
            {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]},
            "would not compute in mixed_precision='bf16'",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=match):
        Accelerator(cpu=True, **options).prepare(torch.nn.Linear(1, 1))
    forget()


def test_the_timeout_of_the_group_is_taken() -> None:
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).init_handler is handler


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Accelerator, AutocastKwargs), (accelerate.Accelerator, accelerate.utils.AutocastKwargs)],
)
def test_autocast_keeps_casts_as_its_handler_says(kind: Any, options: Any) -> None:
    accelerator = kind(cpu=True, mixed_precision="bf16")
    found: list[tuple[bool, bool]] = []
    for handler in (options(), options(cache_enabled=False), options(enabled=False)):
        with accelerator.autocast(handler):
            found.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    assert found == [(True, True), (True, False), (False, True)]


HANDLER_NAMES = (
    *("autocast_handler", "ddp_handler", "scaler_handler", "init_handler", "profile_handler"),
    *("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler"),
    *("has_fp8_handler", "fp8_enabled", "delayed_fp8_autocast", "native_amp", "has_lomo_optimizer"),
    *("rng_types", "step", "scaler"),
)


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_handlers_and_what_follows_from_them_are_those_of_the_real_one(mode: str) -> None:
    names = ("AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "ProfileKwargs")
    found: list[dict[str, str]] = []
    for kind, home in ((Accelerator, kwargs_handlers), (accelerate.Accelerator, accelerate.utils)):
        handlers = [getattr(home, name)() for name in names] if mode == "bf16" else []
        accelerator: Any = kind(cpu=True, mixed_precision=mode, kwargs_handlers=handlers)
        found.append({name: str(getattr(accelerator, name)) for name in HANDLER_NAMES})
        forget()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["AORecipeKwargs", "MSAMPRecipeKwargs"])
def test_options_of_fp8_are_refused_in_another_precision(name: str) -> None:
    for kind, home in ((Accelerator, fp8_recipes), (accelerate.Accelerator, accelerate.utils)):
        handler = getattr(home, name)()
        with pytest.raises(ValueError, match="mixed_precision='fp8'"):
            kind(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
        forget()


def test_options_of_fp8_that_are_set_later_are_refused_too() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.te_recipe_handler = fp8_recipes.TERecipeKwargs()
    with pytest.raises(ValueError, match="TERecipeKwargs with mixed_precision='no'"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_a_handler_can_be_set_until_the_run_is_composed() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = handler = AutocastKwargs(cache_enabled=False)
    assert accelerator.autocast_handler is handler
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="composed from its handlers at the first prepare"):
        accelerator.autocast_handler = AutocastKwargs()


def test_a_plugin_comes_before_the_variable_of_another_backend_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fsdp, engine = FullyShardedDataParallelPlugin(), DeepSpeedPlugin(zero_stage=1)
    for variable, given, kind in (
        ("ACCELERATE_USE_DEEPSPEED", {"fsdp_plugin": fsdp}, DistributedType.FSDP),
        ("ACCELERATE_USE_FSDP", {"deepspeed_plugin": engine}, DistributedType.DEEPSPEED),
    ):
        with environ.exported(**{variable: "true"}):
            assert Accelerator(cpu=True, **given).distributed_type == kind
        assert f"{variable}=true gives way to {next(iter(given))}= of the program" in caplog.text
        forget()
    with environ.exported(ACCELERATE_USE_FSDP="true"):
        caplog.clear()
        Accelerator(cpu=True, fsdp_plugin=fsdp)
        assert not caplog.records
        forget()


def test_two_backends_at_once_are_refused() -> None:
    both = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}
    with (
        environ.exported(**both),
        pytest.raises(ValueError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED"),
    ):
        Accelerator(cpu=True)
    fsdp, engine = FullyShardedDataParallelPlugin(), DeepSpeedPlugin(zero_stage=1)
    with pytest.raises(ValueError, match="fsdp_plugin= and deepspeed_plugin="):
        Accelerator(cpu=True, fsdp_plugin=fsdp, deepspeed_plugin=engine)


CONTRADICTED = [
    ("FSDP_VERSION", "1", {"fsdp_version": 2}),
    ("FSDP_OFFLOAD_PARAMS", "true", {"cpu_offload": False}),
    ("FSDP_ACTIVATION_CHECKPOINTING", "true", {"activation_checkpointing": False}),
    ("FSDP_RESHARD_AFTER_FORWARD", "true", {"fsdp_version": 2, "reshard_after_forward": False}),
    ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", {"state_dict_type": "FULL_STATE_DICT"}),
    ("FSDP_MIN_NUM_PARAMS", "7", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5}),
    ("FSDP_USE_ORIG_PARAMS", "true", {"use_orig_params": False}),
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", {"zero_stage": 1}),
    ("ACCELERATE_GRADIENT_CLIPPING", "2.0", {"gradient_clipping": 1.0}),
]


@pytest.mark.parametrize(("variable", "text", "given"), CONTRADICTED)
def test_a_plugin_in_code_comes_before_a_variable_as_in_the_real_one(
    variable: str, text: str, given: dict[str, Any]
) -> None:
    ours, theirs = (
        (FullyShardedDataParallelPlugin, accelerate.FullyShardedDataParallelPlugin)
        if variable.startswith("FSDP")
        else (DeepSpeedPlugin, accelerate.DeepSpeedPlugin)
    )
    with environ.exported(**{variable: None}):
        alone = vars(ours(**given))
    with environ.exported(**{variable: text}):
        beside, real = vars(ours(**given)), vars(theirs(**given))
    for name in given:
        assert str(beside[name]) == str(alone[name]) == str(real[name])
