import errno
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    CheckpointSettings,
    OtherRankFailedError,
    Replicated,
    StateError,
    find_checkpoints,
    read_manifest,
)
from drivetrain_checkpoint.saving.writer_lock import LOCK_FILE
from drivetrain_state import Context, ParallelDims, connect


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


def save_step(checkpointer: Checkpointer, step: int) -> Path:
    own = {"rng": torch.arange(3)}
    return save(checkpointer, step, state_of(step), replicated={"step": step}, per_rank=own)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK_FILE)


def test_a_run_started_over_does_not_lose_its_new_checkpoints_to_old_higher_steps(
    tmp_path: Path, context: Context
) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=CheckpointSettings(keep_last=1))
    save(checkpointer, 500)
    save(checkpointer, 100)
    assert names_in(tmp_path) == ["step-100"]


@pytest.mark.parametrize(
    "now",
    [
        {"weight": torch.arange(2000.0)},
        {"weight": torch.arange(1000, dtype=torch.int32)},
        {"weight": torch.arange(1000.0), "bias": torch.ones(3)},
        {"weight": torch.arange(1000.0).view(10, 100)},
        {"bias": torch.arange(1000.0)},
        {},
    ],
    ids=["shape", "dtype", "more", "dimensions", "name", "less"],
)
def test_a_state_that_has_changed_is_planned_anew(
    tmp_path: Path, context: Context, now: dict[str, torch.Tensor]
) -> None:
    checkpointer = Checkpointer(context, tmp_path)
    save(checkpointer, 1, {"weight": torch.arange(1000.0)})
    save(checkpointer, 2, now, per_rank={"own": now})
    loaded = checkpointer.load()
    assert loaded.per_rank is not None
    for state in (loaded.models["model"], loaded.per_rank["own"]):
        assert state.keys() == now.keys()
        for name, tensor in now.items():
            assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(state[name], tensor)


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path)
    for value in (1, 2, 3):
        path = save(checkpointer, 5, state_of(value))
        assert torch.equal(checkpointer.load().models["model"]["weight"], state_of(value)["weight"])
    assert names_in(path) == [
        "manifest.json", "rank-0.2.json", "state.2.json", "weights-model.2.json", "weights-model.r0.2.safetensors"
    ]  # fmt: skip


def test_a_save_that_is_refused_leaves_all_as_it_was(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path)
    save_step(checkpointer, 5)
    before = names_in(tmp_path / "step-5")
    with pytest.raises(StateError, match=r"^replicated\['bad'\]: it is a function"):
        save(checkpointer, 5, state_of(6), replicated={"bad": save})
    with pytest.raises(StateError, match=r"^per_rank\['bad'\]"):
        save(checkpointer, 6, state_of(6), per_rank={"bad": save})
    assert names_in(tmp_path / "step-5") == before
    assert names_in(tmp_path) == ["step-5"]
    assert checkpointer.load().replicated == {"step": 5}


def test_leftovers_of_a_save_that_died_make_room(tmp_path: Path, context: Context) -> None:
    folder = tmp_path / "step-5"
    folder.mkdir()
    (folder / "weights-model.r0.safetensors").write_bytes(b"torn")
    save_step(Checkpointer(context, tmp_path), 5)
    assert "weights-model.r0.safetensors" in names_in(folder)
    assert Checkpointer(context, tmp_path).load().step == 5


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_a_step_is_a_count(tmp_path: Path, context: Context, step: object) -> None:
    with pytest.raises(ValueError, match=r"^step=.* an integer from 0 on"):
        save(Checkpointer(context, tmp_path), step)  # type: ignore[arg-type]


def test_no_file_is_a_pickle(tmp_path: Path, context: Context) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = save(
        Checkpointer(context, tmp_path),
        1,
        model.state_dict(),
        replicated={"optimizer": optimizer.state_dict(), "odd": (1, b"x", {2: float("nan")})},
        per_rank={"rng": torch.get_rng_state(), "python": random.getstate()},
    )
    for file in path.iterdir():
        content = file.read_bytes()
        # Pickles from protocol 2 on begin with \x80; torch.save and NumPy files with the marks of zip and .npy.
        assert content[:1] != b"\x80", file
        assert content[:4] != b"PK\x03\x04", file
        assert content[:6] != b"\x93NUMPY", file
        start = content[8:9] if file.suffix == ".safetensors" else content[:1]
        assert start == b"{", file


def two_ranks_save(directory: str, keep_last: int) -> list[str]:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory, settings=CheckpointSettings(keep_last=keep_last))
        for step in (1, 2, 3):
            path = save_step(checkpointer, step)
            assert (path / "manifest.json").is_file()  # committed when it returns, whatever the rank
    return names_in(path)


def refused(directory: str, what: str) -> str:
    """Return the error of a save that rank 1, or rank 0, cannot make."""
    settings = CheckpointSettings(keep_last=3, keep_best=1, best_metric="loss")
    with connect(device="cpu") as context, pytest.MonkeyPatch.context() as patch:
        checkpointer, is_main = Checkpointer(context, directory, settings=settings), context.topology.is_main
        step, metrics, state, bad = 1, {"loss": 1.0}, {}, {}
        if what == "a folder that cannot be listed" and is_main:
            patch.setattr("drivetrain_checkpoint.saving.coordinator.find_checkpoints", stale)
        elif what == "an object" and not is_main:
            bad = {"bad": object()}
        elif what == "a tensor" and not is_main:
            state = {"expert": Replicated(torch.ones(2))}
        elif what == "a metric" and not is_main:
            metrics = {"los": 1.0}
        elif what == "a step":
            step = context.topology.rank
        with pytest.raises((StateError, ValueError, OSError, OtherRankFailedError)) as caught:
            checkpointer.save(step, models={"m": state}, replicated={}, per_rank=bad, metrics=metrics)
        return f"{type(caught.value).__name__}: {caught.value}"


def stale(_: Path) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


GIVEN_UP = "OtherRankFailedError: the save of step 1 was given up on every rank: rank"
UNKNOWN = r"StateError: rank 1 has a part of 'expert' \(weights-m\), and rank 0's state"
DIFFERENT = r"ValueError: .*different folders \(rank 0: .*/step-0, rank 1: .*/step-1\)"


@pytest.mark.parametrize(
    ("what", "on_main", "on_other"),
    [
        ("an object", f"{GIVEN_UP} 1 failed", r"StateError: per_rank\['bad'\]: it is a object"),
        ("a folder that cannot be listed", "OSError: .*Stale file handle", f"{GIVEN_UP} 0"),
        ("a step", DIFFERENT, DIFFERENT),
        ("a tensor", UNKNOWN, UNKNOWN),
        ("a metric", GIVEN_UP, "ValueError: metrics={'los': 1.0} lacks best_metric='loss'"),
    ],
)
def test_what_one_rank_cannot_save_is_an_error_on_all_and_leaves_nothing(
    run_ranks, tmp_path: Path, what: str, on_main: str, on_other: str
) -> None:
    main, other = run_ranks(refused, str(tmp_path), what)
    assert re.match(on_main, main), main
    assert re.match(on_other, other), other
    assert not list(tmp_path.rglob("manifest.json"))


def test_each_rank_writes_its_own_and_rank_zero_the_rest(run_ranks, tmp_path: Path) -> None:
    files = [
        "manifest.json", "rank-0.json", "rank-0.r0.safetensors", "rank-1.json", "rank-1.r1.safetensors",
        "state.json", "weights-model.json", "weights-model.r0.safetensors",
    ]  # fmt: skip
    assert run_ranks(two_ranks_save, str(tmp_path), 2) == [files, files]
    assert names_in(tmp_path) == ["step-2", "step-3"]


def save_on_a_mesh(directory: str) -> dict[str, int]:
    with connect(device="cpu", parallelism=ParallelDims(data=1, shard=2)) as context:
        return dict(read_manifest(save(Checkpointer(context, directory), 2)).mesh)


def test_the_mesh_stands_in_the_manifest(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(save_on_a_mesh, str(tmp_path)) == [{"data": 1, "shard": 2}] * 2


KILLED_SAVES = """
import itertools, os, random, signal, sys, threading, time
from pathlib import Path
import torch
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, find_checkpoints
from drivetrain_state import Context, Topology

directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
context = Context(topology=Topology(), device=torch.device("cpu"))
checkpointer = Checkpointer(context, directory, settings=CheckpointSettings(keep_last=2))

def save(step):
    weight = torch.full((500_000,), float(step))
    checkpointer.save(step, models={"model": {"weight": weight, "tied": weight}}, replicated={"step": step},
                      per_rank={})

save(0)
started = time.monotonic()
save(1)
one_save_seconds = time.monotonic() - started
chance = random.Random(0)
killed = 0
for number in range(rounds):
    before = checkpointer.load().step
    delay = chance.uniform(0, 3 * one_save_seconds)
    child = os.fork()
    if child == 0:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in itertools.count(before + 1):
            save(step)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    loaded = checkpointer.load()
    assert loaded.step >= before, (loaded.step, before)
    assert loaded.replicated == {"step": loaded.step}
    assert torch.equal(loaded.models["model"]["weight"], torch.full((500_000,), float(loaded.step)))
    assert loaded.models["model"]["tied"] is loaded.models["model"]["weight"]
save(loaded.step + 1)  # the first that ends whole deletes what those killed between commit and deletion have left
assert checkpointer.load().step == loaded.step + 1
assert [one.is_valid for one in find_checkpoints(directory)] == [True, True]
print("killed", killed)
"""


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(12, marks=pytest.mark.timeout(240)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_killed_at_any_moment_the_newest_valid_one_loads(
    run_ranks_script, tmp_path: Path, rounds: int
) -> None:
    # The script holds what loads after each kill against what was saved.
    [result] = run_ranks_script(
        KILLED_SAVES, str(tmp_path), str(rounds), num_processes=1, timeout_seconds=10 * rounds + 60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"killed {rounds}\n"


KILLED_RANK = """
import os, signal, sys
import torch
from drivetrain_checkpoint import Checkpointer
from drivetrain_state import StateSettings, connect

def save(checkpointer, step):
    checkpointer.save(step, models={"model": {"weight": torch.ones(10)}}, replicated={}, per_rank={})

with connect(StateSettings(device="cpu", timeout_seconds=20, watchdog=False)) as context:
    checkpointer = Checkpointer(context, sys.argv[1])
    save(checkpointer, 1)
    if context.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(checkpointer, 2)
    except RuntimeError as error:
        print("noticed", type(error).__name__, flush=True)
        os._exit(7)
"""


def test_a_rank_that_is_killed_ends_the_save_and_commits_nothing(run_ranks_script, tmp_path: Path) -> None:
    noticed, killed = run_ranks_script(KILLED_RANK, str(tmp_path))
    assert killed.returncode == -signal.SIGKILL
    assert noticed.returncode == 7, noticed.stderr
    assert "noticed" in noticed.stdout
    assert [one.folder.name for one in find_checkpoints(tmp_path) if one.is_valid] == ["step-1"]


UNSHARED_FOLDER = """
import ctypes, os, subprocess, sys
if os.environ["RANK"] == "1":  # a mount that this process alone sees, as another host's disk would be
    CLONE_NEWNS = 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        sys.exit(3)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", sys.argv[1]], check=True)

from drivetrain_checkpoint import Checkpointer
from drivetrain_state import connect

with connect(device="cpu") as context:
    try:
        Checkpointer(context, sys.argv[1]).save(1, models={}, replicated={}, per_rank={})
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
"""


def can_mount() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="wants Linux mount namespaces, and the right to make one")
def test_a_folder_that_another_host_does_not_see_is_an_error(run_ranks_script, tmp_path: Path) -> None:
    main, other = run_ranks_script(UNSHARED_FOLDER, str(tmp_path))
    assert other.stdout.startswith("FolderNotSharedError: rank 1 on "), other.stderr
    assert "every host mounts" in other.stdout
    assert main.stdout.startswith(
        "OtherRankFailedError: the save of step 1 was given up on every rank: rank 1"
    )
    assert names_in(tmp_path) == ["script.py"]


def test_a_disk_error_leaves_the_earlier_checkpoint(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path)
    save(checkpointer, 1)
    (tmp_path / "step-2").write_text("a file stands where the folder should be")
    with pytest.raises(FileExistsError, match="step-2"):
        save(checkpointer, 2)
    assert checkpointer.load().step == 1


def test_nothing_is_deleted_before_the_commit(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=CheckpointSettings(keep_last=1))
    save(checkpointer, 1)

    def fail(*_: object) -> None:
        assert [one.folder.name for one in find_checkpoints(tmp_path) if one.is_valid] == ["step-1"]
        raise OSError("disk full")

    monkeypatch.setattr("drivetrain_checkpoint.saving.transaction.commit_manifest", fail)
    with pytest.raises(OSError, match="disk full"):
        save(checkpointer, 2)
    assert checkpointer.load().step == 1
    assert names_in(tmp_path) == ["step-1"]
