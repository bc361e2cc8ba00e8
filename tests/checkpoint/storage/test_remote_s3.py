import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    CheckpointSettings,
    CorruptCheckpointError,
    NoCheckpointError,
    find_checkpoints,
)
from drivetrain_checkpoint.format.layout import has_manifest
from drivetrain_checkpoint.planning.save_content import Content
from drivetrain_checkpoint.saving.coordinator import SaveCoordinator
from drivetrain_checkpoint.saving.transaction import run_save
from drivetrain_checkpoint.storage.place import storage_of
from drivetrain_state import Context, connect
from object_store import s3_server

Options = Mapping[str, Any]
LARGE = 40 * 2**20  # elements of four bytes: 160 MiB, three parts of an upload


@pytest.fixture
def make(context: Context, bucket: str, s3_options: Options) -> Callable[..., Checkpointer]:
    """Make a checkpointer of one directory on the server."""

    def make(
        url: str = f"s3://{bucket}/run", *, keep_last: int | None = None, **options: object
    ) -> Checkpointer:
        settings = CheckpointSettings(keep_last=keep_last, storage_options={**s3_options, **options})
        return Checkpointer(context, url, settings=settings)

    return make


def save_step(checkpointer: Checkpointer, step: int, value: float | None = None) -> Any:
    weight = torch.full((1000,), float(step if value is None else value))
    own = {"rng": torch.arange(3)}
    return save(checkpointer, step, {"weight": weight}, replicated={"step": step}, per_rank=own)


def names_below(checkpointer: Checkpointer) -> list[str]:
    root = checkpointer.directory
    return sorted(name.removeprefix(f"{root.path}/") for name in root.fs.find(root.path, refresh=True))


def unfinished(checkpointer: Checkpointer) -> list[str]:
    fs = checkpointer.directory.fs
    return [
        upload["Key"] for upload in fs.list_multipart_uploads(fs.split_path(checkpointer.directory.path)[0])
    ]


@pytest.mark.slow
def test_what_was_saved_last_comes_back_bit_by_bit(make) -> None:
    checkpointer = make()
    for step in (7, 3):
        path = save_step(checkpointer, step)
    loaded = checkpointer.load()
    assert (loaded.step, loaded.path, checkpointer.latest()) == (3, path, path)
    assert torch.equal(loaded.models["model"]["weight"], torch.full((1000,), 3.0))
    assert torch.equal(loaded.per_rank["rng"], torch.arange(3))
    assert checkpointer.load(f"{checkpointer.directory}/step-7").replicated == {"step": 7}


def test_a_bucket_may_be_the_directory(make, bucket: str) -> None:
    checkpointer = make(f"s3://{bucket}")
    save(checkpointer, 1)
    assert [one.folder.name for one in find_checkpoints(checkpointer.directory)] == ["step-1"]


@pytest.mark.slow
def test_large_files_go_in_parts_and_come_back_in_blocks(make) -> None:
    checkpointer = make()
    weight = torch.arange(LARGE, dtype=torch.int32)
    path = save(checkpointer, 1, {"weight": weight})
    file = path / "weights-model.r0.safetensors"
    bucket, key, _ = file.fs.split_path(file.path)
    assert file.fs.call_s3("head_object", Bucket=bucket, Key=key, PartNumber=1)["PartsCount"] == 3
    assert torch.equal(checkpointer.load().models["model"]["weight"], weight)
    assert unfinished(checkpointer) == []


@pytest.mark.slow
def test_a_step_saved_again_replaces_the_old_one_and_older_steps_leave_nothing(make) -> None:
    checkpointer = make(keep_last=1)
    save(checkpointer, 10)
    for value in (1, 2, 3):
        save_step(checkpointer, 5, value)
        assert checkpointer.load().models["model"]["weight"][0] == value
    assert names_below(checkpointer) == [
        f"step-5/{name}"
        for name in (
            "manifest.json", "rank-0.2.json", "rank-0.r0.2.safetensors", "state.2.json", "weights-model.2.json",
            "weights-model.r0.2.safetensors",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["changed", "short", "gone", "no manifest"])
@pytest.mark.default_cases("changed")
def test_a_damaged_one_is_passed_over(make, damage: str, caplog) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    folder = save_step(checkpointer, 2)
    file = folder / ("manifest.json" if damage == "no manifest" else "weights-model.r0.safetensors")
    content = file.read_bytes()
    if damage == "changed":
        file.write_bytes(content[:-1] + b"\1")
    elif damage == "short":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    assert checkpointer.load().step == 1
    assert (f"{folder} is passed over" in caplog.text) is (damage != "no manifest")
    with pytest.raises(CorruptCheckpointError, match=file.name):
        checkpointer.load(folder)


@pytest.mark.slow
def test_what_another_host_has_saved_is_seen_at_once(make) -> None:
    mine, theirs = make(), make(skip_instance_cache=True)
    save(mine, 1)
    assert storage_of(mine.directory).folders_in(mine.directory) == ["step-1"]
    save(theirs, 2)
    assert storage_of(mine.directory).folders_in(mine.directory) == ["step-1", "step-2"]
    assert mine.latest().name == "step-2"
    assert mine.load().step == 2


@pytest.mark.slow
def test_a_save_that_is_given_up_leaves_nothing_at_all(make, context: Context) -> None:
    checkpointer = make()
    content = Content(models={"model": {"weight": torch.zeros(LARGE)}}, replicated={}, per_rank={}, plan=None)
    sent: list[list[str]] = []

    def fail_late() -> None:
        sent.append(unfinished(checkpointer))
        if len(sent) == 9:  # of 16 MiB: two parts are sent
            raise KeyboardInterrupt

    one = SaveCoordinator(context, checkpointer.directory, checkpointer.settings).prepare(
        1, content, continues=True
    )
    with pytest.raises(KeyboardInterrupt):
        run_save(context, one, on_block=fail_late)
    assert sent[-1] == ["run/step-1/weights-model.r0.safetensors"]
    assert unfinished(checkpointer) == []
    assert names_below(checkpointer) == []


KILLED = """
import json, os, signal, sys
import torch
from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_checkpoint.planning.save_content import Content
from drivetrain_checkpoint.saving.transaction import run_save
from drivetrain_checkpoint.saving.coordinator import SaveCoordinator
from drivetrain_state import connect

context = connect(device="cpu")
settings = CheckpointSettings(storage_options=json.loads(sys.argv[2]))
checkpointer = Checkpointer(context, sys.argv[1], settings=settings)
content = Content(models={"model": {"weight": torch.zeros(40 * 2**20)}}, replicated={}, per_rank={}, plan=None)
blocks = []

def die_late():
    blocks.append(1)
    if len(blocks) == 9:
        os.kill(os.getpid(), signal.SIGKILL)

one = SaveCoordinator(context, checkpointer.directory, checkpointer.settings).prepare(2, content, continues=True)
run_save(context, one, on_block=die_late)
"""


def test_after_a_kill_the_earlier_one_loads_and_the_next_save_tidies_up(
    python: str, make, s3_options: Options
) -> None:
    checkpointer = make()
    save(checkpointer, 1)
    command = [python, "-c", KILLED, str(checkpointer.directory), json.dumps(s3_options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert unfinished(checkpointer) == ["run/step-2/weights-model.r0.safetensors"]
    assert checkpointer.load().step == 1
    save(checkpointer, 2)
    assert unfinished(checkpointer) == []
    assert checkpointer.load().step == 2


@pytest.mark.slow
def test_a_save_in_the_background_goes_on_while_the_program_ends(make, s3_options: Options) -> None:
    """What is begun then is no part of `concurrent.futures`, which takes no more calls."""
    checkpointer = make()
    command = [sys.executable, "-c", ENDING, str(checkpointer.directory), json.dumps(s3_options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [one.folder.name for one in find_checkpoints(checkpointer.directory)] == ["step-2"]
    assert checkpointer.load().step == 2


ENDING = """
import json, sys
import torch
from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_state import connect

settings = CheckpointSettings(keep_last=1, storage_options=json.loads(sys.argv[2]))
checkpointer = Checkpointer(connect(device="cpu"), sys.argv[1], settings=settings)
for step, size in ((1, 10), (2, 40 * 2**20)):
    checkpointer.save(
        step, models={"model": {"weight": torch.zeros(size)}}, replicated={}, per_rank={}, background=step == 2
    )
"""


def save_and_load(url: str, options: Options) -> tuple[int, int, float, list[str]]:
    with connect(device="cpu") as context:
        settings = CheckpointSettings(keep_last=1, storage_options=options)
        checkpointer = Checkpointer(context, url, settings=settings)
        rank = context.topology.rank
        for step in (1, 2):
            weight = torch.full((2**20,), float(step))
            path = save(checkpointer, step, {"weight": weight}, per_rank={"rank": rank})
        loaded = checkpointer.load()
        names = sorted(file.name for file in path.iterdir())
        return loaded.step, loaded.per_rank["rank"], float(loaded.models["model"]["weight"].mean()), names


@pytest.mark.slow
def test_ranks_save_and_load_together(run_ranks, make, bucket: str, s3_options: Options) -> None:
    results = run_ranks(save_and_load, f"s3://{bucket}/run", s3_options)
    assert [result[:3] for result in results] == [(2, 0, 2.0), (2, 1, 2.0)]
    assert {"rank-0.json", "rank-1.json", "weights-model.r0.safetensors"} <= set(results[0][3])
    assert make().load().saved_world_size == 2


def test_a_prefix_below_which_there_is_nothing_holds_no_checkpoint(make, bucket: str) -> None:
    checkpointer = make(f"s3://{bucket}/nothing")
    assert checkpointer.latest() is None
    with pytest.raises(
        NoCheckpointError, match=f"no checkpoint to load in s3://{bucket}/nothing: it holds none"
    ):
        checkpointer.load()
    with pytest.raises(NoCheckpointError, match="nothing/step-1 is no folder on every rank"):
        checkpointer.load(f"s3://{bucket}/nothing/step-1")


def test_a_bucket_that_does_not_exist_is_said_so(make) -> None:
    checkpointer = make("s3://no-such-bucket/run")
    for use in (checkpointer.load, lambda: save(checkpointer, 1)):
        with pytest.raises(
            FileNotFoundError, match=r"^s3://no-such-bucket/run.*: The specified bucket does not exist"
        ):
            use()


def test_credentials_that_the_store_does_not_know_are_refused(context: Context, s3_options: Options) -> None:
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as options:
        settings = CheckpointSettings(storage_options=options)
        checkpointer = Checkpointer(context, "s3://bucket/run", settings=settings)
        for use in (checkpointer.load, lambda: save(checkpointer, 1)):
            with pytest.raises(
                PermissionError, match=r"^s3://bucket/run.*: .*Access Key Id you provided does not exist"
            ):
                use()


def test_a_store_that_does_not_answer_is_named(make) -> None:
    checkpointer = make(endpoint_url="http://127.0.0.1:9", config_kwargs={"retries": {"max_attempts": 1}})
    with pytest.raises(
        OSError, match=r'^s3://.*/run: Could not connect to the endpoint URL: "http://127.0.0.1:9/'
    ):
        checkpointer.load()


def test_options_are_shown_nowhere(make, s3_options: Options) -> None:
    checkpointer = make()
    path = save_step(checkpointer, 1)
    shown = [repr(checkpointer.settings), repr(path), str(path)]
    shown += [file.read_bytes().decode("latin1") for file in path.iterdir()]
    assert not [text for text in shown if s3_options["secret"] in text]


def test_files_that_are_not_there_are_as_on_a_disk(make) -> None:
    directory = make().directory
    storage = storage_of(directory)
    assert (storage.sizes_in(directory), storage.folders_in(directory)) == ({}, [])
    assert not has_manifest(directory)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        storage.read_whole(directory / "manifest.json")
