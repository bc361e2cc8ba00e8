from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, CheckpointHook, ConfigError
from drivetrain.saving import other_formats
from drivetrain_config.plugins.installed import EntryPoint
from plain_loop.accelerated import accelerator_of, weights_of
from registered import Kept


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dict has no state_dict\(\) and load_state_dict\(\)"):
        Accelerator(cpu=True).register_for_checkpointing({})


def test_a_folder_of_checkpoints_stands_for_its_newest_and_needs_no_project(tmp_path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    folders = []
    for _ in range(2):
        folders.append(accelerator.save_state(tmp_path))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert accelerator.load_state(tmp_path) == 1
    assert accelerator.load_state(folders[0]) == 0


def test_a_run_of_its_own_is_loaded_without_a_look_at_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    folder = accelerator.save_state(tmp_path)
    (tmp_path / "empty").mkdir()
    missing = EntryPoint(name="other", value="a_format_that_is_not_imported", distribution="other")
    monkeypatch.setattr(other_formats, "entry_points", lambda group: (missing,))
    assert [accelerator.load_state(place) for place in (tmp_path, folder)] == [0, 0]
    with pytest.raises(ModuleNotFoundError, match="a_format_that_is_not_imported"):
        accelerator.load_state(tmp_path / "empty")


def test_kept_models_keep_the_weights_they_have_and_their_optimizers_are_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    given = [nn.Linear(1, 1), nn.Linear(1, 1)]
    trained = [accelerator.prepare(one, SGD(one.parameters(), lr=0.1)) for one in given]
    registered = nn.Linear(1, 1)
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(tmp_path)
    models = [*(model for model, _ in trained), registered]
    for model in models:
        nn.init.constant_(model.weight, 7.0)
    for _, optimizer in trained:
        optimizer.param_groups[0]["lr"] = 0.5
    accelerator.load_state(tmp_path, kept_models=[models[0], registered])
    assert [model.weight.item() == 7.0 for model in models] == [True, False, True]
    assert [optimizer.param_groups[0]["lr"] for _, optimizer in trained] == [0.1, 0.1]
    with pytest.raises(ValueError, match="prepare"):
        accelerator.load_state(tmp_path, kept_models=[nn.Linear(1, 1)])


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_kept_models_keep_their_weights_on_each_rank(tmp_path: Path, backend: str) -> None:
    with accelerator_of(backend) as accelerator:
        given = [nn.Linear(4, 4), nn.Linear(4, 4)]
        models = [accelerator.prepare(one, SGD(one.parameters(), lr=0.1))[0] for one in given]
        accelerator.save_state(tmp_path)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.fill_(7.0)
        accelerator.load_state(tmp_path, kept_models=[models[0]])
        states = [weights_of(accelerator, model) for model in models]
    assert [all((value == 7.0).all() for value in state.values()) for state in states] == [True, False]


def test_runs_are_kept_at_urls_and_their_options_in_no_plan() -> None:
    pytest.importorskip("upath")
    checkpoint = {"directory": "memory://resume/section", "storage_options": {"token": "whispered"}}
    accelerator = Accelerator(cpu=True, sections={"checkpoint": checkpoint})
    accelerator.prepare(nn.Linear(2, 1))
    path = accelerator.save_state()
    assert str(path) == "memory://resume/section/step-0"
    assert accelerator.load_state() == 0
    assert accelerator.load_state(str(path)) == 0
    assert str(accelerator.save_state("memory://resume/named")) == "memory://resume/named/step-0"
    assert "memory://resume/section" in str(accelerator.plan.as_dict())
    assert "whispered" not in str(accelerator.plan.as_dict())
    assert b"whispered" not in (path / "manifest.json").read_bytes()


def test_a_project_needs_a_folder_of_this_machine() -> None:
    with pytest.raises(
        ConfigError, match=r"project_dir='s3:/bucket/run': logs and the plan go into a folder"
    ):
        Accelerator(cpu=True, project_dir="s3://bucket/run")


def test_a_name_is_given_once() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(ema=Kept())
    with pytest.raises(ValueError, match=r"ema=\.\.\.\): the name is taken"):
        accelerator.register_for_checkpointing(ema=Kept())


def test_registered_objects_come_back_by_name_in_any_order(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1))
    saved.register_for_checkpointing(a=Kept(1), b=Kept(2))
    saved.save_state()
    loaded = Accelerator(cpu=True, project_dir=tmp_path)
    loaded.prepare(nn.Linear(1, 1))
    a, b = Kept(), Kept()
    loaded.register_for_checkpointing(b=b, a=a)
    loaded.load_state()
    assert (a.value, b.value) == (1, 2)


def test_a_checkpoint_of_other_objects_is_refused(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(4))))
    saved.save_state()
    other = Accelerator(cpu=True, project_dir=tmp_path)
    other.prepare(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"the checkpoint holds loaders \['0'\], and this run has \[\]"):
        other.load_state()


def test_an_optimizer_over_other_parameters_is_refused_by_name(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(1, 1)
    saved.prepare(model, SGD(model.parameters(), lr=0.1))
    saved.save_state()
    other = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(1, 1)
    other.prepare(model, SGD([model.weight], lr=0.1))
    with pytest.raises(ValueError, match=r"differs from the checkpoint's by \['bias'\]"):
        other.load_state()


def test_generators_go_on_where_they_were(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1))
    saved.save_state()
    expected = torch.rand(3)
    loaded = Accelerator(cpu=True, project_dir=tmp_path)
    loaded.prepare(nn.Linear(1, 1))
    loaded.load_state()
    assert torch.equal(torch.rand(3), expected)


def started(tmp_path, **options):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, seed=0, **options)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(12.0).unsqueeze(1))
    model, optimizer, loader = accelerator.prepare(
        model, SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2, shuffle=True)
    )
    return accelerator, model, optimizer, loader


def train_on(accelerator, model, optimizer, batch) -> list[float]:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return batch.flatten().tolist()


@pytest.mark.parametrize("save_first", [True, False])
def test_the_batch_in_hand_comes_again_unless_its_gradients_are_in_the_weights(tmp_path, save_first) -> None:
    accelerator, *training, loader = started(tmp_path / "whole")
    whole = [train_on(accelerator, *training, batch) for (batch,) in loader]
    expected = training[0].weight.item()
    accelerator, *training, loader = started(tmp_path)
    trained = []
    for number, (batch,) in enumerate(loader):
        if save_first and number == 3:
            accelerator.save_state()
            break
        trained.append(train_on(accelerator, *training, batch))
        if number == 2 and not save_first:
            accelerator.save_state()
            break
    accelerator, *training, loader = started(tmp_path)
    accelerator.load_state()
    trained += [train_on(accelerator, *training, batch) for (batch,) in loader]
    assert trained == whole
    assert training[0].weight.item() == expected


def test_without_an_optimizer_a_batch_received_is_done(tmp_path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    data = DataLoader(torch.arange(8), batch_size=2)
    _, loader = accelerator.prepare(nn.Linear(1, 1), data)
    next(iter(loader))
    accelerator.save_state()
    again = Accelerator(cpu=True, project_dir=tmp_path)
    _, loader = again.prepare(nn.Linear(1, 1), data)
    again.load_state()
    assert next(iter(loader)).tolist() == [2, 3]


class Log(CheckpointHook):
    """Notes what it is told, and whether the checkpoint is whole then."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def before_save(self, step: int) -> None:
        self.calls.append(("before_save", step))

    def after_commit(self, folder: Path) -> None:
        self.calls.append(("after_commit", folder.name, (folder / "manifest.json").exists()))

    def before_load(self) -> None:
        self.calls.append("before_load")

    def after_load(self, step: int) -> None:
        self.calls.append(("after_load", step))


@pytest.mark.parametrize("background", [False, True])
def test_hooks_are_told_of_saves_and_loads(tmp_path: Path, background: bool) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.prepare(nn.Linear(1, 1))
    log = Log()
    accelerator.register_checkpoint_hook(log)
    accelerator.save_state(background=background)
    accelerator.load_state()
    assert log.calls == [
        ("before_save", 0), ("after_commit", "step-0", True), "before_load", ("after_load", 0)
    ]  # fmt: skip
    accelerator.end_training()
