import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_backends import AccumulationError, PairingError, UnknownBackendError
from drivetrain_checkpoint import NoCheckpointError
from drivetrain_checkpoint.format.checksummed_io import HashedWriter
from drivetrain_checkpoint.saving.writer_lock import WriterLock
from drivetrain_config import ConfigError
from plain_loop.accelerated import take_steps


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


def parts(accelerator: Accelerator, *, samples: int = 8, batch_size: int = 2):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer, DataLoader(numbers(samples), batch_size=batch_size))


@pytest.mark.costly
def test_importing_the_accelerator_imports_nothing_that_takes_as_long_as_torch() -> None:
    heavy = {
        "sympy",
        "triton",
        "torch._dynamo",
        "torch.distributed.tensor",
        "deepspeed",
        "transformers",
        "yaml",
    }
    code = f"import sys, torch; from drivetrain import Accelerator; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_prepare_keeps_the_order_and_gives_one_object_for_one() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    loader = DataLoader(numbers(4))
    results = accelerator.prepare(scheduler, loader, optimizer, model)
    assert [type(r).__name__ for r in results] == [
        "PreparedScheduler",
        "ShardedLoader",
        "PreparedOptimizer",
        "Linear",
    ]
    assert results[3] is model
    assert type(Accelerator(cpu=True).prepare(nn.Linear(1, 1))).__name__ == "Linear"


def test_what_cannot_be_prepared_is_named_with_its_place() -> None:
    with pytest.raises(
        TypeError, match=r"argument 1 is of type dict, which cannot be prepared; allowed are nn\.Module"
    ):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), {"lr": 1})


def test_preparing_twice_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    for prepared in (optimizer, loader):
        with pytest.raises(ValueError, match="prepared already"):
            accelerator.prepare(prepared)
    with pytest.raises(ValueError, match="prepared already"):
        accelerator.prepare(model)


def test_an_optimizer_that_was_not_prepared_is_told_at_the_first_loss_even_in_an_open_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model), pytest.raises(PairingError, match="Pass it to prepare"):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_a_state_dict_is_the_models_own_on_the_cpu_and_stays_as_it_was() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepared = accelerator.prepare(model)
    found = accelerator.get_state_dict(prepared)
    with torch.no_grad():
        model[0].weight.zero_()
    assert found["0.weight"] is found["1.weight"]
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(ValueError, match="Linear was not prepared"):
        accelerator.get_state_dict(nn.Linear(1, 1))


def test_accumulate_does_not_nest() -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _ = parts(accelerator)
    with accelerator.accumulate(model):
        with pytest.raises(AccumulationError, match="one micro-batch is open already"):
            accelerator.accumulate(model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precision": "fp12"}, ConfigError, "mixed_precision='fp12'"),
        ({"backend": "dpp"}, UnknownBackendError, "must be 'auto' or one of 'ddp', "),
        (
            {"gradient_accumulation_steps": 0},
            ConfigError,
            "gradient_accumulation_steps=0: must be at least 1",
        ),
        ({"log_with": "jsonl"}, ConfigError, "project_dir, which is not set"),
        ({"seed": -1}, ConfigError, "seed=-1: must lie between"),
    ],
)
def test_a_bad_argument_is_named(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Accelerator(cpu=True, **arguments)


def test_breaking_out_of_a_loader_leaves_the_window_open_for_the_next_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = parts(accelerator)  # 4 batches
    steps: list[int] = []
    for stop in (3, None):
        for i, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            steps.append(optimizer.num_steps)
            if stop is not None and i + 1 == stop:
                break
    # three micro-batches, a break, then one more fills the window; the epoch's last batch closes the next early
    assert steps == [0, 0, 0, 1, 1, 1, 2]


def test_the_plan_says_what_was_asked_applied_and_where_it_came_from() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="auto", seed=3)
    accelerator.prepare(nn.Linear(1, 1))
    rows = {row.setting: row for row in accelerator.plan.rows}
    assert rows["run.mixed_precision"].asked == "auto"
    assert rows["run.mixed_precision"].applied == accelerator.mixed_precision
    assert rows["run.mixed_precision"].reason.startswith("auto chose")
    assert rows["run.seed"].source.startswith("code")


_THREE_RUNS = """
import os, sys, torch
from drivetrain import Accelerator

for number in range(3):
    run = Accelerator(cpu=True, project_dir=f"run-{number}", gradient_accumulation_steps=4, seed=number)
    loader = torch.utils.data.DataLoader(torch.ones(64, 1), batch_size=8, shuffle=True)
    run.prepare(torch.nn.Linear(1, 1), loader)
    run.prepare(torch.nn.Linear(1, 1))
if not os.fork():  # another process shows its own
    Accelerator(cpu=True, sections={"run": {"verbose": True, "show_plan": False}}).prepare(torch.nn.Linear(1, 1))
    sys.stderr.flush()
    os._exit(0)
os.wait()
"""


def test_the_plan_is_printed_once_a_process_in_few_plain_words_and_stored_whole(
    tmp_path, monkeypatch, run_ranks_script
) -> None:
    monkeypatch.chdir(tmp_path)
    (rank,) = run_ranks_script(_THREE_RUNS, num_processes=1)
    short, whole = rank.stderr.split("effective plan", 1)
    shown = short.splitlines()
    assert shown == [
        "trains   1 on 1 node, cpu: SingleBackend in the model's own precision",
        "a step   batches of 8 x 4 micro-batches = 32 samples in a step; shuffled, seed 0",
        "kept     in run-0",
        "chosen   run.backend = single: one process",
        "more     run-0/plan.json; --verbose at the launch prints it",
    ]
    assert "run.verbose" in whole
    assert "setting" in whole
    for number in range(3):
        stored = json.loads((tmp_path / f"run-{number}" / "plan.json").read_text())
        assert stored["facts"]["data 0"].endswith(f"shuffled, seed {number}")
        assert f"keyed by (seed {number}, epoch)" in stored["details"]["data 0"]


@pytest.mark.slow
def test_the_users_configuration_is_logged_as_it_is_and_the_plan_stands_beside(tmp_path) -> None:
    mine = Kept()
    with Accelerator(cpu=True, project_dir=tmp_path, log_with=["jsonl", mine], seed=5) as accelerator:
        assert accelerator.trackers == (accelerator.get_tracker("jsonl"), mine)
        accelerator.init_trackers("run", {"lr": 0.1}, init_kwargs={"kept": {"tags": ["a"]}})
        accelerator.log({"loss": 1.0}, step=2, log_kwargs={"kept": {"commit": False}})
    started = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert started["config"] == {"lr": 0.1}
    assert json.loads((tmp_path / "plan.json").read_text()) == mine.plan
    assert mine.plan["settings"]["run.seed"]["asked"] == 5
    assert mine.plan["facts"]["trackers"] == "jsonl, kept"
    assert mine.told == [("run", {"lr": 0.1}, ["a"]), ({"loss": 1.0}, 2, False)]


class Kept:
    """A tracker of one's own that keeps what it is told."""

    name = "kept"
    on_all_ranks = False

    def __init__(self) -> None:
        self.told: list[object] = []
        self.plan: dict = {}

    def start(self, run_name, config, *, tags=()) -> None:
        self.told.append((run_name, config, tags))

    def record_plan(self, plan) -> None:
        self.plan = plan

    def log(self, values, *, step=None, commit=True) -> None:
        self.told.append((values, step, commit))

    def finish(self) -> None: ...


def test_trackers_are_objects_names_or_all_there_are(tmp_path) -> None:
    assert [one.name for one in Accelerator(cpu=True, log_with=Kept()).trackers] == ["kept"]
    everything = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    assert "jsonl" in [one.name for one in everything.trackers]
    (row,) = [row for row in everything.plan.rows if row.setting == "run.log_with"]
    assert row.asked == ("all",)
    assert row.applied == tuple(one.name for one in everything.trackers)
    with pytest.raises(ValueError, match="'kept' is there 2 times"):
        Accelerator(cpu=True, log_with=[Kept(), Kept()])
    with pytest.raises(TypeError, match="Linear is no tracker, for it lacks start, log, finish, name"):
        Accelerator(cpu=True, log_with=[nn.Linear(1, 1)])


class One(nn.Linear):
    """One weight, which begins at 1."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("lengths", [(2, 4), (3, 1)])
@pytest.mark.default_cases("lengths0-ddp", "lengths1-fsdp")
def test_another_accumulation_holds_from_the_next_window_on(backend: str, lengths: tuple[int, int]) -> None:
    """With one number of micro-batches in a first window and another from then on."""
    micro_batches = torch.linspace(0.2, 1.2, 2 * (lengths[0] + 2 * lengths[1]))
    by_rank = micro_batches.chunk(2)
    expected, weight, first = list[float](), 1.0, 0
    while first < len(by_rank[0]):  # by one process that has all micro-batches
        length = lengths[1] if first else lengths[0]
        window = torch.cat([part[first : first + length] for part in by_rank])
        weight -= 0.1 * (2 * weight * window.square()).mean().item()
        expected.append(weight)
        first += length
    with Accelerator(cpu=True, backend=backend, gradient_accumulation_steps=lengths[0]) as accelerator:
        model = One()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        found: list[float] = []
        for number, x in enumerate(by_rank[accelerator.process_index]):
            if number == lengths[0]:
                accelerator.gradient_accumulation_steps = lengths[1]
            take_steps(
                accelerator, model, optimizer, lambda _, x=x: model(x.reshape(1, 1)).square().mean(), [0]
            )
            if accelerator.sync_gradients:
                with accelerator.gathered(model):
                    found.append(model.weight.item())
        applied = accelerator.plan.as_dict()["settings"]["run.gradient_accumulation_steps"]["applied"]
        assert applied == lengths[1]
        assert found == pytest.approx(expected, rel=1e-5)


def test_accumulation_is_not_changed_in_an_open_window_and_ends_between_windows() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        if number == 0:
            with pytest.raises(AccumulationError, match="in an open window, after 1 of its 2"):
                accelerator.gradient_accumulation_steps = 1
    accelerator.gradient_accumulation_steps = 1  # the window is closed, and its step comes after
    optimizer.step()
    assert model.weight.grad.item() == 1.0
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum())  # a window of its own now, as in a plain loop
    optimizer.step()
    assert model.weight.grad.item() == 1.0
    optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(AccumulationError, match=r"backward\(\) outside accumulate\(\) .*steps=3"):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_a_profile_without_a_folder_is_the_profilers_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile(record_shapes=True) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(event.input_shapes[:2] == [[8, 8], [8, 8]] for event in profiler.key_averages(True))
    assert list(tmp_path.iterdir()) == []
    with Accelerator(cpu=True, project_dir=tmp_path).profile():
        pass
    assert (tmp_path / "profile" / "trace-rank-0.json").exists()
    with pytest.raises(
        TypeError, match=r"profile\(dict\): the first argument is a folder; select what to record by"
    ):
        Accelerator(cpu=True).profile({"record_shapes": True})


@pytest.mark.parametrize("step_inside", [True, False])
def test_saving_in_an_open_window_waits_for_its_step(tmp_path, step_inside: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path)
    model, optimizer, _ = parts(accelerator)
    folder = tmp_path / "checkpoints"
    for number in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            if number == 0:
                assert accelerator.save_state() is None
                assert accelerator.save_state() is None  # one save
            if step_inside:
                optimizer.step()
                optimizer.zero_grad()
            assert folder.exists() == (number == 2)
        if not step_inside:
            optimizer.step()
            optimizer.zero_grad()
    stepped = {name: value.clone() for name, value in model.state_dict().items()}
    assert [path.name for path in folder.glob("step-*")] == ["step-1"]
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state() == 1
    assert all(torch.equal(value, stepped[name]) for name, value in model.state_dict().items())


def test_a_save_at_once_in_an_open_window_is_of_its_last_step_and_its_batches_come_again(tmp_path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path)
    model, optimizer, _ = parts(accelerator)
    loader = accelerator.prepare(DataLoader(torch.arange(8)))
    weights: list[float] = []
    for number, _ in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
        if number == 2:
            assert accelerator.save_state(at_once=True).name == "step-1"
    accelerator.load_state()
    assert model.weight.item() == weights[1] == weights[2] != weights[3]
    assert [batch.item() for batch in loader] == [2, 3, 4, 5, 6, 7]


def test_a_save_that_was_put_off_is_made_when_training_ends(tmp_path) -> None:
    with Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path) as accelerator:
        model, optimizer, _ = parts(accelerator)
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                accelerator.save_state()
                optimizer.step()
    assert (tmp_path / "checkpoints" / "step-1" / "manifest.json").exists()


def test_an_end_at_which_the_save_that_was_put_off_fails_is_an_end(tmp_path) -> None:
    class Unwritable:
        def state_dict(self) -> dict[str, int]:
            raise OSError("nothing to be read")

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            raise NotImplementedError

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path)
    model, optimizer, _ = parts(accelerator)
    accelerator.register_for_checkpointing(Unwritable())
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            if number == 0:
                accelerator.save_state()
            optimizer.step()
    with pytest.raises(OSError, match="nothing to be read"):
        accelerator.end_training()
    with pytest.raises(AccumulationError, match=r"after free_memory\(\), end_training\(\)"):
        optimizer.step()


def test_saving_without_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="set project_dir="):
        Accelerator(cpu=True).save_state()


def test_the_end_lets_other_runs_write(tmp_path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as accelerator:
        parts(accelerator)
        accelerator.save_state()
        checkpointer = accelerator._parts.checkpointers.of(None)
    token = WriterLock(checkpointer.directory).take()
    assert json.loads((checkpointer.directory / "writer.json").read_text())["token"] == token


def test_the_end_raises_what_the_background_met(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    parts(accelerator)

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(HashedWriter, "record", fail)
    accelerator.save_state(background=True)
    with pytest.raises(OSError, match="the disk is gone"):
        accelerator.end_training()


def test_a_save_whose_window_never_closes_is_told_of(tmp_path, caplog) -> None:
    with Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path) as accelerator:
        model, _, _ = parts(accelerator)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            accelerator.save_state()
    assert "the save requested in it was not made" in caplog.text
    assert not (tmp_path / "checkpoints").exists()


def test_unwrapping_without_autocast_leaves_the_model_in_training_as_it_is() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(1, 1))
    plain = accelerator.unwrap_model(model, keep_autocast=False)
    assert type(plain) is nn.Linear
    assert plain.weight is model.weight
    assert plain(torch.ones(1, 1)).dtype is torch.float32
    assert model(torch.ones(1, 1)).dtype is torch.bfloat16


def test_a_scheduler_takes_its_metric_by_name() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(metrics=1.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def gradient_steps(accelerator: Accelerator, *, fail_at: int | None = None) -> list[float]:
    """How far a weight was moved by each optimizer step over four micro-batches of the gradients 1, 2, 4 and 8."""
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    moved: list[float] = []
    for number in range(4):
        before = model.weight.item()
        try:
            with accelerator.accumulate(model):
                if number == fail_at:
                    raise MemoryError
                accelerator.backward(model(torch.tensor([[2.0**number]])).sum())
                optimizer.step()
                optimizer.zero_grad()
        except MemoryError:
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            moved.append(before - model.weight.item())
    return moved


def test_a_micro_batch_that_failed_is_in_no_step_once_its_gradients_are_cleared() -> None:
    plain, failing = (Accelerator(cpu=True, gradient_accumulation_steps=2) for _ in range(2))
    assert gradient_steps(plain) == pytest.approx([1.5, 6.0])
    assert gradient_steps(failing, fail_at=1) == pytest.approx([0.0, 6.0])


@pytest.mark.ranks(2)
def test_a_sharded_model_is_not_unwrapped_without_its_precision() -> None:
    with Accelerator(backend="fsdp", cpu=True) as accelerator:
        model = accelerator.prepare(nn.Linear(2, 2))
        assert accelerator.unwrap_model(model) is model
        with pytest.raises(TypeError, match=r"^Linear is sharded") as caught:
            accelerator.unwrap_model(model, keep_autocast=False)
        assert "inside accelerator.gathered(model), load model.state_dict()" in str(caught.value)


def test_a_state_of_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as accelerator:
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        accelerator.save_state()
    with Accelerator(cpu=True, project_dir=tmp_path) as accelerator:
        model = nn.Linear(1, 1)
        before = model.weight.item()
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"\['dampening', 'momentum'\], .* kind of optimizer than SGD"):
            accelerator.load_state()
        assert model.weight.item() == before


def test_nothing_can_be_saved_or_loaded_before_prepare(tmp_path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"save_state\(\) before prepare\(\).*prepare models first"):
        accelerator.save_state()
    with pytest.raises(RuntimeError, match=r"load_state\(\) before prepare\(\)"):
        accelerator.load_state()
    assert not (tmp_path / "checkpoints").exists()


def test_what_is_no_folder_and_what_are_no_metrics_is_said(tmp_path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    parts(accelerator)
    with pytest.raises(TypeError, match=r"^5: a folder or a URL is allowed"):
        accelerator.save_state(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^metrics=0\.3: give numbers by name"):
        accelerator.save_state(metrics=0.3)  # type: ignore[arg-type]
    path = accelerator.save_state()
    assert path is not None
    with pytest.raises(ValueError, match="is a checkpoint itself: name the folder that holds"):
        accelerator.save_state(path)
    with pytest.raises(NoCheckpointError, match=r"is no checkpoint, but .*/checkpoints holds some"):
        accelerator.load_state(tmp_path)
    (tmp_path / "export").mkdir()
    accelerator.save_model(accelerator._parts.prepared.models[0].model, tmp_path / "export")
    with pytest.raises(NoCheckpointError, match=r"a model alone, which load_model\(\) loads"):
        accelerator.load_state(tmp_path / "export")


def test_anybodys_profile_names_what_a_step_does() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    batch = next(iter(loader))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        accelerator.backward(model(*batch).square().mean())
        optimizer.step()
        accelerator.gather(torch.ones(1))
    ours = {each.key for each in profiler.key_averages() if each.key.startswith("drivetrain: ")}
    assert ours >= {f"drivetrain: {what}" for what in ("forward", "backward", "optimizer step")}
