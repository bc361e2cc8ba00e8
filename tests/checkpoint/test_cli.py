import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain_checkpoint import Checkpointer, CheckpointSettings, find_checkpoints, open_export
from drivetrain_checkpoint.cli import list as listing
from drivetrain_checkpoint.cli import merge, prune, show, verify
from drivetrain_checkpoint.cli.arguments import (
    ListArguments,
    MergeArguments,
    PruneArguments,
    ShowArguments,
    VerifyArguments,
)
from drivetrain_checkpoint.cli.printing import Progress, age_text
from drivetrain_checkpoint.storage.place import locate, storage_of
from drivetrain_messages import format_size
from drivetrain_state import Context

WEIGHTS = "weights-m.r0.safetensors"


def save(context: Context, directory: Path | str, *steps: int) -> None:
    for step in steps:
        Checkpointer(context, directory).save(
            step,
            models={"m": {f"layer{i}": torch.ones(2, 3) * step for i in range(12)} | {"extra": "text"}},
            replicated={"optimizer": {"lr": 0.1, "momentum": torch.zeros(3)}},
            per_rank={},
            metrics={"loss": -abs(step - 11.0)},
            plan={"parallelism": {"data": 1}, "betas": (0.9, 0.95)},
        )


@pytest.fixture
def runs(tmp_path: Path, context: Context) -> Path:
    """Checkpoints: step 9 good, step 2 torn, step 5 good and newest, step 7 not completed."""
    save(context, tmp_path, 9, 2, 5, 7)
    os.truncate(tmp_path / "step-2" / "state.json", 1)
    (tmp_path / "step-7" / "manifest.json").unlink()
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def listed(directory: Path | str, *, json: bool = False) -> int:
    return listing.run(ListArguments(directory=str(directory), json=json))


def pruned(directory: Path | str, keep_last: int, *, dry_run: bool = False) -> int:
    return prune.run(PruneArguments(directory=str(directory), keep_last=keep_last, dry_run=dry_run))


def merged(checkpoint: Path | str, output: Path, *, max_shard_size: str = "5GB") -> int:
    return merge.run(
        MergeArguments(checkpoint=str(checkpoint), output=str(output), max_shard_size=max_shard_size)
    )


def verified(folder: Path | str) -> int:
    return verify.run(VerifyArguments(folder=str(folder)))


def shown(checkpoint: Path | str, *, tensors: bool = False, json: bool = False) -> int:
    return show.run(ShowArguments(checkpoint=str(checkpoint), tensors=tensors, json=json))


class TestList:
    def test_a_table_has_the_last_saved_first_and_says_what_is_wrong(self, runs: Path, capsys) -> None:
        assert listed(runs) == 0
        header, five, two, nine, seven = (
            re.split("  +", row) for row in capsys.readouterr().out.splitlines()
        )
        assert header == ["STEP", "SAVED AT", "AGE", "SIZE", "RANKS", "MODELS", "STATE"]
        assert (five[0], five[4:]) == ("5", ["1", "m", "valid, newest"])
        assert (two[0], nine[0], nine[6]) == ("2", "9", "valid")
        assert two[6].startswith("not valid: ")
        assert "state.json has 1 bytes" in two[6]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", nine[1])
        size = sum(path.stat().st_size for path in (runs / "step-7").iterdir())
        assert seven == ["7", "-", "-", format_size(size), "-", "-", "not completed"]

    def test_json_has_it_all(self, runs: Path, capsys) -> None:
        assert listed(runs, json=True) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(one["step"], one["valid"], one["committed"], one["newest"]) for one in found] == [
            (5, True, True, True),
            (2, False, True, False),
            (9, True, True, False),
            (7, False, False, False),
        ]
        assert (found[0]["ranks"], found[0]["models"], found[0]["problem"]) == (1, ["m"], None)
        assert found[0]["folder"] == str(runs / "step-5")
        assert found[0]["size_bytes"] == find_checkpoints(runs)[0].manifest.size_bytes  # pyright: ignore[reportOptionalMemberAccess]


class TestVerify:
    def test_good_ones_are_told_with_progress_on_stderr(
        self, tmp_path: Path, context: Context, capsys
    ) -> None:
        save(context, tmp_path, 1, 2)
        assert verified(tmp_path) == 0
        said = capsys.readouterr()
        assert re.fullmatch(r"step-2: good: \d files, .* kB\nstep-1: good: \d files, .* kB\n", said.out)
        assert re.match(r"verify step-2: (\S+ kB) of \1, \S+ [kMG]?B/s\n", said.err)

    def test_all_damage_is_told_with_file_and_bytes(self, runs: Path, capsys) -> None:
        for name in (WEIGHTS, "state.json"):
            path = runs / "step-9" / name
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert verified(runs) == 1
        said = capsys.readouterr().out
        for name in (WEIGHTS, "state.json"):
            path = runs / "step-9" / name
            assert f"{path}: bytes 0 to {path.stat().st_size}: the checksum differs" in said
        assert f"{runs / 'step-2' / 'state.json'}: bytes 0 to " in said
        assert "step-9: damaged in 2 places\n" in said
        assert "step-5: good: " in said
        assert "step-7: not completed" in said

    def test_a_damaged_manifest_is_damage(self, runs: Path, capsys) -> None:
        (runs / "step-5" / "manifest.json").write_text("{}")
        assert verified(runs / "step-5") == 1
        assert re.match(r"step-5: not valid: .*manifest.json is damaged", capsys.readouterr().out)


class TestShow:
    def test_words_and_tables(self, runs: Path, capsys) -> None:
        assert shown(runs / "step-5") == 0
        said = capsys.readouterr().out
        assert f"checkpoint  {runs / 'step-5'}\nstep        5, save 3 into its folder\n" in said
        assert re.search(r"^written by  .*torch \d.*drivetrain-checkpoint \d", said, flags=re.MULTILINE)
        assert re.search(rf"^{WEIGHTS}  +\S+ kB$", said, flags=re.MULTILINE)
        assert "weights-m: 12 tensors, 288 B\n" in said
        assert re.search(r"^layer9  F32    \[2, 3\]  1$", said, flags=re.MULTILINE)
        assert "layer10" not in said
        assert "... and 2 more; --tensors lists all\n" in said
        assert re.search(r"^parallelism.data +1$", said, flags=re.MULTILINE)
        assert shown(runs / "step-5", tensors=True) == 0
        said = capsys.readouterr().out
        assert "layer11" in said
        assert " more; " not in said

    def test_a_torn_file_is_no_reason_not_to_show_the_rest(self, runs: Path, capsys) -> None:
        assert shown(runs / "step-2") == 0
        assert re.search(
            r"^state       not valid: .*state.json has 1 bytes", capsys.readouterr().out, re.MULTILINE
        )

    def test_json_has_all_tensors(self, runs: Path, capsys) -> None:
        assert shown(runs / "step-5", json=True) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["step"], said["sequence"], said["ranks"], said["problem"]) == (5, 3, 1, None)
        assert len(said["tensors"]["weights-m"]) == 12
        assert said["tensors"]["state"] == {
            "optimizer/momentum": {"dtype": "F32", "shape": [3], "size_bytes": 12, "pieces": 1}
        }
        assert said["files"][WEIGHTS] == (runs / "step-5" / WEIGHTS).stat().st_size
        assert said["plan"] == {"parallelism": {"data": 1}, "betas": {"$tuple": [0.9, 0.95]}}


class TestMerge:
    def test_files_are_told_and_what_is_left_out(self, runs: Path, tmp_path: Path, capsys, caplog) -> None:
        assert merged(runs / "step-5", tmp_path / "out", max_shard_size="240") == 0
        said = capsys.readouterr()
        assert said.out == (
            "model-00001-of-00002.safetensors: 10 tensors, 240 B\n"
            "model-00002-of-00002.safetensors: 2 tensors, 48 B\n"
        )
        assert said.err.startswith("merge m: 288 B of 288 B, ")
        assert "'extra'" in caplog.text
        assert torch.equal(open_export(tmp_path / "out")["layer11"], torch.ones(2, 3) * 5)

    def test_no_such_size_is_told_at_once(self) -> None:
        with pytest.raises(ValueError, match="max_shard_size='5 apples': must be"):
            MergeArguments(checkpoint="a", output="b", max_shard_size="5 apples")


class TestPrune:
    def test_old_and_uncompleted_ones_go_and_damaged_ones_stay(self, runs: Path, capsys) -> None:
        assert pruned(runs, 1, dry_run=True) == 0
        said = capsys.readouterr().out
        assert re.match(
            r"would delete step-9 \(\S+ kB\)\nwould delete step-7 \(\S+ kB, never completed\)\n", said
        )
        assert names(runs) == ["step-2", "step-5", "step-7", "step-9"]
        assert pruned(runs, 1) == 0
        said = capsys.readouterr().out
        assert re.match(r"delete step-9 \(\S+ kB\)\ndelete step-7 \(\S+ kB, never completed\)\n", said)
        assert "\nkeep step-5\n" in said
        assert re.search(r"^keep step-2, to be looked at: .*state.json has 1 bytes", said, re.MULTILINE)
        assert re.search(r"^delete 2 folders, \S+ kB$", said, re.MULTILINE)
        assert names(runs) == ["step-2", "step-5"]

    def test_without_a_valid_one_nothing_goes(self, runs: Path, capsys) -> None:
        for step in (5, 9):
            os.truncate(runs / f"step-{step}" / "state.json", 1)
        assert pruned(runs, 1) == 0
        assert len(names(runs)) == 4
        assert capsys.readouterr().out.endswith("\ndelete 0 folders, 0 B\n")

    def test_what_could_not_go_whole_is_an_error(self, runs: Path, caplog) -> None:
        (runs / "step-9" / "notes.txt").write_text("mine")
        assert pruned(runs, 1) == 1
        assert "step-9 could not be deleted whole" in caplog.text
        assert [file.name for file in (runs / "step-9").iterdir()] == ["notes.txt"]

    def test_more_may_stay_by_the_rules_of_the_settings(self, tmp_path: Path, context: Context) -> None:
        save(context, tmp_path, 10, 11, 12, 20, 21)
        arguments = PruneArguments(
            directory=str(tmp_path),
            keep_last=1,
            keep_every=10,
            keep_best=1,
            best_metric="loss",
            best_mode="max",
        )
        assert prune.run(arguments) == 0
        assert names(tmp_path) == ["step-10", "step-11", "step-20", "step-21"]

    def test_a_metric_that_no_checkpoint_has_deletes_nothing(
        self, tmp_path: Path, context: Context, capsys
    ) -> None:
        save(context, tmp_path, 10, 11)
        arguments = PruneArguments(directory=str(tmp_path), keep_last=1, keep_best=1, best_metric="lss")
        assert prune.run(arguments) == 2
        assert "best_metric='lss': no checkpoint of" in (told := capsys.readouterr().err)
        assert "they have loss" in told
        assert names(tmp_path) == ["step-10", "step-11"]

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"keep_last": 0}, "^keep_last=0: must be at least 1"),
            ({"keep_last": 1, "keep_best": 1}, "best_metric"),
        ],
    )
    def test_no_such_rule_is_told_at_once(self, given: dict[str, int], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            PruneArguments(directory="a", **given)  # pyright: ignore[reportArgumentType]

    @pytest.mark.slow
    def test_nothing_goes_while_a_run_writes_there(self, python: str, runs: Path, capsys) -> None:
        with subprocess.Popen(
            [python, "-c", HOLDER, str(runs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert pruned(runs, 1) == 2
            holder.communicate()
        assert "is written by another run" in capsys.readouterr().err
        assert len(names(runs)) == 4


# Another run, until its input ends.
HOLDER = """
import sys
from pathlib import Path
from drivetrain_checkpoint.saving.writer_lock import WriterLock
from drivetrain_messages import format_size
lock = WriterLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda runs: listed(runs / "gone"), "gone is no folder: name a folder of checkpoints"),
        (lambda runs: listed(runs / "step-5"), "step-5 is a checkpoint: name the folder that it is in, "),
        (lambda runs: listed(runs / "empty"), "empty holds no checkpoints: name the folder in which"),
        (lambda runs: pruned(runs / "empty", 1), "empty holds no checkpoints"),
        (lambda runs: verified(runs / "empty"), "empty holds no checkpoints"),
        (lambda runs: verified(runs / "step-7"), "step-7 is a save that was never completed"),
        (lambda runs: shown(runs), "is no checkpoint but holds some: name one, such as "),
        (lambda runs: listed(runs / "project"), "/project holds no checkpoints itself: name "),
        (lambda runs: shown(runs / "project"), "/project/checkpoints/step-1"),
        (lambda runs: shown(runs / "empty"), "empty is no checkpoint, for it has no manifest.json"),
        (lambda runs: shown(runs / "step-9"), "manifest.json is damaged"),
        (lambda runs: merged(runs / "step-9", runs / "out"), "manifest.json is damaged"),
        (lambda runs: merged(runs / "step-2", runs / "out"), "state.json has 1 bytes"),
        (lambda runs: merged(runs / "step-5", runs / "step-5"), "is the checkpoint itself"),
        (lambda _: listed("nosuch://bucket"), "nosuch://bucket: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(runs: Path, capsys, run, told: str) -> None:
    (runs / "empty").mkdir()
    (runs / "project" / "checkpoints" / "step-1").mkdir(parents=True)
    (runs / "step-9" / "manifest.json").write_text("{}")
    assert run(runs) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("drivetrain: error: ")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_urls_do_as_well(context: Context, tmp_path: Path, capsys) -> None:
    pytest.importorskip("upath")
    url = "memory://commands/run"
    save(context, url, 1, 2, 3)
    manifest = locate(f"{url}/step-3/manifest.json")
    storage_of(manifest).remove([manifest])
    assert listed(url) == 0
    assert verified(url) == 0
    assert shown(f"{url}/step-2") == 0
    assert merged(f"{url}/step-2", tmp_path / "out") == 0
    assert pruned(url, 1) == 0
    assert "memory://commands/run/step-2" in capsys.readouterr().out
    assert [one.folder.name for one in find_checkpoints(locate(url))] == ["step-2"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400, "1 d"), (86400 * 400, "400 d")],
)
def test_an_age_is_told_in_its_largest_unit(seconds: int, text: str) -> None:
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert age_text((now - timedelta(seconds=seconds)).isoformat(), now) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_and_an_error_adds_nothing(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Progress("verify x", 2000) as progress:
        progress.advance(1000)
        progress.advance(1000)
    lines = terminal.getvalue()
    assert re.match(r"\rverify x: 2.00 kB of 2.00 kB, .*/s *\n$", lines[lines.rindex("\r") :])
    assert lines.count("\n") == 1
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with pytest.raises(ValueError, match="bad"), Progress("verify x", 2000):
        raise ValueError("bad")
    assert terminal.getvalue() == ""


@pytest.mark.slow
def test_a_store_is_reached_by_the_options_of_the_settings(
    context: Context, bucket: str, s3_options: Mapping[str, Any], monkeypatch, capsys
) -> None:
    url = f"s3://{bucket}/run"
    settings = CheckpointSettings(storage_options=s3_options)
    checkpointer = Checkpointer(context, url, settings=settings)
    checkpointer.save(1, models={"m": {"w": torch.ones(3)}}, replicated={}, per_rank={})
    monkeypatch.setenv("DRIVETRAIN_CHECKPOINT__STORAGE_OPTIONS", json.dumps(s3_options))
    assert verified(f"{url}/step-1") == 0
    assert capsys.readouterr().out.startswith("step-1: good: ")


def test_the_help_imports_no_torch() -> None:
    pytest.importorskip("drivetrain_launcher")
    source = (
        "import sys; from drivetrain_launcher.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main(['checkpoint', command, '--help'])\n"
        "    except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    commands = ["list", "verify", "show", "merge", "prune"]
    done = subprocess.run(
        [sys.executable, "-c", source, *commands], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert all(f"usage: drivetrain checkpoint {command}" in done.stdout for command in commands)
