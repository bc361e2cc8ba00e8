"""What Accelerate's names answer, and what its guide says of them."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Accelerator
from drivetrain_migration.counterparts import COUNTERPARTS

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "from_accelerate.md"


def test_the_guide_says_what_the_errors_say() -> None:
    lines = GUIDE.read_text().splitlines()
    rows = [
        f"| {', '.join(f'`{word}`' for word in theirs.split())} | {here} |"
        for theirs, here in COUNTERPARTS.items()
    ]
    assert [row for row in rows if row not in lines] == []


def test_every_argument_attribute_and_name_answers_with_its_counterpart() -> None:
    accelerator = Accelerator(cpu=True)
    for word, here in (
        (word, re.escape(here)) for theirs, here in COUNTERPARTS.items() for word in theirs.split()
    ):
        name = word.strip(".=")
        if word.endswith("="):
            with pytest.raises(TypeError, match=rf"^Accelerator\(\) takes no {name}=, .*{here}$"):
                Accelerator(cpu=True, **{name: None})
        elif word.startswith("."):
            assert not hasattr(accelerator, name)
            with pytest.raises(AttributeError, match=rf"no attribute '{name}', .*{here}$"):
                getattr(accelerator, name)
            with pytest.raises(AttributeError, match=rf"no attribute '{name}', .*{here}$"):
                setattr(accelerator, name, True)
        else:
            with pytest.raises(ImportError, match=rf"^cannot import '{name}' from 'drivetrain': .*{here}$"):
                exec(f"from drivetrain import {name}", {})


def test_no_name_stands_in_two_lines_or_is_here_after_all() -> None:
    words = [word for theirs in COUNTERPARTS for word in theirs.split()]
    assert len(words) == len(set(words))
    assert not {*words} & {*drivetrain.__all__, *(f".{name}" for name in dir(Accelerator))}


class Used:
    """Passes everything on to an object, and notes which of its attributes were used."""

    def __init__(self, inner: object, names: set[str]) -> None:
        self.__dict__.update(_inner=inner, _names=names)

    def __getattr__(self, name: str):
        self._names.add(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._names.add(name)
        setattr(self._inner, name, value)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def names_that_are_the_same() -> set[str]:
    rows = re.findall(r"^\| (.*) \| ((?:the same|from `drivetrain`).*) \|$", GUIDE.read_text(), re.MULTILINE)
    assert len(rows) >= 10
    words = [word for row, _ in rows for word in re.findall(r"`(\w+)[`(]", row)]
    return set(words)


# torch says that a trace of one cycle holds that cycle alone.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")
@pytest.mark.slow
def test_what_the_guide_calls_the_same_is_used_as_accelerate_documents_it(tmp_path, capsys) -> None:
    names: set[str] = set()
    module = Used(drivetrain, names)
    logger = module.get_logger(__name__, log_level="INFO")
    module.set_seed(3)
    run = Used(
        Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=tmp_path, log_with="jsonl"), names
    )
    train(run, tmp_path)
    talk(run)
    logger.info("done", main_process_only=True)
    run.end_training()
    assert run.clear(1, 2) == run.free_memory(1, 2) == [None, None]
    dispatch(module, tmp_path)
    assert module.notebook_launcher is drivetrain.notebook_launcher  # its own tests start it
    assert capsys.readouterr().out.startswith("a line\n")
    assert names_that_are_the_same() - names == set()


def train(run, folder: Path) -> None:
    model, data = nn.Linear(2, 1), torch.arange(16.0).reshape(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, DataLoader(data, 2), scheduler)
    counter = Counter()
    run.register_for_checkpointing(counter)
    run.init_trackers("ported", {"lr": 0.01}, {})
    with run.profile(record_shapes=True) as profiler:
        for x in loader:
            with run.accumulate(model):
                with run.autocast():
                    loss = model(x).mean()
                run.backward(loss)
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log({"loss": loss}, 1, {})
    assert any(event.key == "aten::addmm" for event in profiler.key_averages())
    with run.no_sync(model):
        pass
    run.gradient_accumulation_steps = 4
    assert run.gradient_accumulation_steps == 4
    assert len([*run.skip_first_batches(loader, 3)]) == 1
    assert run.gather_for_metrics(torch.ones(2)).shape == (2,)
    assert [tracker.name for tracker in run.trackers] == ["jsonl"]
    assert run.get_tracker("jsonl").name == "jsonl"
    counter.count = 5
    run.save_state(str(folder / "saved"))
    counter.count = 0
    run.load_state(str(folder / "saved"))
    assert counter.count == 5
    assert run.unwrap_model(model) is model
    assert set(run.get_state_dict(model)) == {"weight", "bias"}
    run.save_model(model, str(folder / "export"), max_shard_size="10GB")


def talk(run) -> None:
    run.print("a", "line", sep=" ", flush=True)
    assert (run.device.type, run.num_processes, run.process_index, run.local_process_index) == (
        "cpu",
        1,
        0,
        0,
    )
    assert run.is_main_process
    assert run.is_local_main_process
    assert not run.use_distributed
    assert run.on_main_process(lambda: 3)() == 3
    with run.main_process_first(), run.split_between_processes([1, 2, 3], apply_padding=True) as mine:
        assert mine == [1, 2, 3]
    run.set_trigger()
    assert [run.check_trigger(), run.check_trigger()] == [True, False]
    one = torch.ones(1)
    for result in (run.gather(one), run.reduce(one, reduction="sum"), run.pad_across_processes(one, dim=0)):
        assert result.tolist() == [1.0]
    assert run.broadcast(one, from_process=0).tolist() == [1.0]
    run.wait_for_everyone()


def dispatch(module, folder: Path) -> None:
    with module.init_empty_weights():
        empty = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert empty[0].weight.is_meta
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    device_map = module.infer_auto_device_map(whole, max_memory={"cpu": "1GB"})
    x, expected = torch.ones(1, 2), whole(torch.ones(1, 2))
    (folder / "whole").mkdir()
    save_file(whole.state_dict(), folder / "whole" / "model.safetensors")
    loaded = module.load_checkpoint_and_dispatch(empty, folder / "whole", device_map=device_map)
    assert torch.equal(loaded(x), expected)
    assert torch.equal(module.dispatch_model(whole, device_map)(x), expected)
    offloaded, _ = module.cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    assert offloaded(x).shape == module.cpu_offload(nn.Linear(2, 2), "cpu")(x).shape == (1, 2)
    assert module.disk_offload(nn.Linear(2, 2), folder / "offload", "cpu")(x).shape == (1, 2)
    assert module.find_executable_batch_size(lambda batch_size: batch_size, starting_batch_size=4)() == 4
