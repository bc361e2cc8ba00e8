"""Saves while training goes on."""

import signal
import threading
from pathlib import Path

import pytest
import torch

from checkpoint.saves import save, saves_held_back
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, OtherRankFailedError, Replicated
from drivetrain_checkpoint.saving.host_buffer import HostBuffer
from drivetrain_state import Context, connect

IN_BACKGROUND = CheckpointSettings(background=True, stall_seconds=60, keep_last=2)


def save_weight(checkpointer: Checkpointer, step: int, weight: torch.Tensor) -> Path:
    return save(checkpointer, step, {"weight": weight}, replicated={"step": step}, per_rank={"rank": step})


def test_what_training_does_meanwhile_is_not_saved(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=IN_BACKGROUND)
    weight = torch.zeros(5_000_000)
    for step in (1, 2, 3):
        weight.fill_(step)
        path = save_weight(checkpointer, step, weight)
        weight.fill_(-1)
        assert path == tmp_path / f"step-{step}"
    assert checkpointer.wait() == tmp_path / "step-3"
    assert checkpointer.wait() is None
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-3"]
    for step in (2, 3):
        assert checkpointer.load(tmp_path / f"step-{step}").models["model"]["weight"].eq(step).all()


def test_a_load_waits_for_the_save(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=IN_BACKGROUND)
    save_weight(checkpointer, 7, torch.ones(5_000_000))
    assert checkpointer.load().step == 7


def test_what_goes_wrong_is_raised_by_the_next_call_once(tmp_path: Path, context: Context, caplog) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=IN_BACKGROUND)
    save_weight(checkpointer, 1, torch.ones(3))
    checkpointer.wait()
    (tmp_path / "step-2").mkdir()
    with saves_held_back():
        path = save_weight(checkpointer, 2, torch.ones(3))
        (path / "state.json").touch()
    with pytest.raises(FileExistsError, match=r"state\.json"):
        save_weight(checkpointer, 3, torch.ones(3))
    assert "the save of step 2 failed in the background" in caplog.text
    save_weight(checkpointer, 4, torch.ones(3))
    assert checkpointer.load().step == 4


def test_memory_is_kept_for_the_next_save_and_given_back_at_the_end(tmp_path: Path, context: Context) -> None:
    buffer = HostBuffer()
    first, _ = buffer.stage([torch.ones(1000), torch.ones(3, dtype=torch.bool)])
    second, _ = buffer.stage([torch.zeros(1000), torch.tensor(2.5, dtype=torch.float64)])
    assert first[0].data_ptr() == second[0].data_ptr()
    assert second[1] == 2.5
    assert second[0].untyped_storage().nbytes() == 4032 + 64
    odd = torch.arange(6).reshape(2, 3).t()
    [staged], _ = buffer.stage([odd])
    assert torch.equal(staged, odd)
    assert staged.is_contiguous()


def test_only_one_runs_at_a_time(tmp_path: Path, context: Context) -> None:
    checkpointer, go = Checkpointer(context, tmp_path, settings=IN_BACKGROUND), threading.Event()
    ended: list[str] = []
    checkpointer.after_commit.append(lambda folder: (go.wait(10), ended.append(folder.name)))
    save_weight(checkpointer, 1, torch.ones(3))  # comes back while its thread is held
    assert ended == []
    threading.Timer(0.2, go.set).start()
    path = save_weight(checkpointer, 2, torch.ones(3))  # waits for the first
    assert ended[:1] == ["step-1"]
    assert checkpointer.wait() == path
    assert ended == ["step-1", "step-2"]


def two_ranks(directory: str) -> list[int]:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory, settings=IN_BACKGROUND)
        for step in (1, 2, 3):
            save_weight(checkpointer, step, torch.full((100_000,), float(step)))
            torch.distributed.barrier()  # the main thread's collectives go on
        checkpointer.close()
        return [checkpointer.load(f"{directory}/step-{step}").step for step in (2, 3)]


def rank_one_fails(directory: str) -> str:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory, settings=IN_BACKGROUND)
        save_weight(checkpointer, 1, torch.ones(3))
        checkpointer.wait()
        Path(directory, "step-2").mkdir(exist_ok=True)
        torch.distributed.barrier()
        with saves_held_back():
            path = save(checkpointer, 2, {"weight": Replicated(torch.ones(4_000_000))})
            if context.topology.rank == 1:
                (path / "rank-1.json").touch()
        with pytest.raises((FileExistsError, OtherRankFailedError)) as caught:
            checkpointer.wait()
        assert checkpointer.load().step == 1
        return f"{type(caught.value).__name__}: {caught.value}"


def test_two_ranks_commit_beside_training(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(two_ranks, str(tmp_path)) == [[2, 3], [2, 3]]


def test_a_rank_that_fails_ends_the_save_on_all_of_them(run_ranks, tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    first, second = run_ranks(rank_one_fails, str(tmp_path))
    assert first.startswith(
        "OtherRankFailedError: the save of step 2 was given up on every rank: rank 1 failed"
    )
    assert second.startswith("FileExistsError")


SILENT_RANK = """
import os, signal, sys, threading, time
import torch
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, OtherRankFailedError
from drivetrain_state import connect

folder, end, stall_seconds = sys.argv[1:]
context = connect(device="cpu", settings=None)
settings = CheckpointSettings(background=True, stall_seconds=float(stall_seconds))
checkpointer = Checkpointer(context, folder, settings=settings)
def save(step):
    checkpointer.save(step, models={"m": {"w": torch.full((1000,), float(step))}}, replicated={}, per_rank={})
save(1)
checkpointer.wait()
if context.topology.rank == 1:
    from drivetrain_checkpoint.saving.transaction import Save
    held = threading.Event()
    killed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Save.write = (lambda *_: held.wait(5)) if end == "stalls" else killed
save(2)
if end == "raises":
    raise RuntimeError("training has failed")
if end == "exits":
    sys.exit(3)
if end == "interrupted":
    raise KeyboardInterrupt
try:
    checkpointer.wait()
except OtherRankFailedError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("waits", 0), ("raises", 1), ("exits", 3), ("interrupted", -signal.SIGINT)]
)
@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_save_however_the_others_end(
    run_ranks_script, tmp_path: Path, end: str, code: int
) -> None:
    first, second = run_ranks_script(
        SILENT_RANK, str(tmp_path), end, "600", num_processes=2, timeout_seconds=60, fresh=True
    )
    assert second.returncode == -signal.SIGKILL
    assert first.returncode in (code, 130 if end == "interrupted" else code)
    assert "the process of rank 1 has ended before its part was done" in first.stdout + first.stderr
    assert (tmp_path / "step-1").exists()
    assert not (tmp_path / "step-2").exists()


@pytest.mark.slow
def test_a_rank_that_stalls_is_waited_for_no_longer_than_the_settings_say(
    run_ranks_script, tmp_path: Path
) -> None:
    first, _ = run_ranks_script(
        SILENT_RANK, str(tmp_path), "stalls", "1", num_processes=2, timeout_seconds=60
    )
    assert "rank 1 has not answered, and no rank has written anything for 1 s" in first.stdout
    assert not (tmp_path / "step-2").exists()


EXITS_AT_ONCE = """
import sys
import torch
from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_state import connect

with connect(device="cpu") as context:
    checkpointer = Checkpointer(context, sys.argv[1], settings=CheckpointSettings(background=True))
    weight = torch.ones(10_000_000)
    checkpointer.save(1, models={"m": {"w": weight}}, replicated={}, per_rank={})
print("main ends", flush=True)
"""


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.slow
def test_a_program_that_ends_waits_for_the_commit(
    run_ranks_script, tmp_path: Path, context: Context, num_processes: int
) -> None:
    ranks = run_ranks_script(
        EXITS_AT_ONCE, str(tmp_path), num_processes=num_processes, timeout_seconds=60, fresh=True
    )
    assert [(rank.returncode, rank.stdout, rank.stderr) for rank in ranks] == [
        (0, "main ends\n", "")
    ] * num_processes
    assert Checkpointer(context, tmp_path).load().step == 1


def rank_one_has_no_memory(directory: str) -> str:
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, directory, settings=IN_BACKGROUND)
        if context.topology.rank == 1:
            HostBuffer.stage = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory to pin"))
        with pytest.raises(RuntimeError) as caught:
            save_weight(checkpointer, 1, torch.ones(3))
        return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_without_memory_for_its_copies_ends_the_save_at_once(run_ranks_script, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_background import rank_one_has_no_memory\n"
        "print(rank_one_has_no_memory(sys.argv[1]))"
    )
    folder = tmp_path / "run"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    first, second = run_ranks_script(script, str(folder), *paths, timeout_seconds=60)
    assert "rank 1 failed with RuntimeError: no memory to pin" in first.stdout, first.stderr
    assert second.stdout == "RuntimeError: no memory to pin\n"
    assert not list(folder.glob("step-*"))
