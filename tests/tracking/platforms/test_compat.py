"""Each private name of a library is what the trackers rely on: these tests tell when a new version changes one."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain_tracking.platforms import compat


@pytest.fixture(scope="module")
def aim_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    aim = pytest.importorskip("aim")
    repo = aim.Repo.from_path(str(tmp_path_factory.mktemp("aim")), init=True)
    run = aim.Run(repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
    yield run
    run.close()


@pytest.mark.slow
def test_aim_stores_a_value_with_its_time_and_finds_the_run_in_its_index(aim_run: Any) -> None:
    context = pytest.importorskip("aim.storage.context").Context({"attempt": 2})
    compat.aim_track(aim_run, 0.5, time=1.25, name="loss", step=3, context={"attempt": 2})
    assert aim_run.get_metric("loss", context).data.items_list() == (
        [3],
        [[0.5], [pytest.approx(float("nan"), nan_ok=True)], [1.25]],
    )
    assert [one.hash for one in aim_run.repo.iter_runs()] == []
    compat.aim_add_to_index(aim_run)
    assert [one.hash for one in aim_run.repo.iter_runs()] == [aim_run.hash]
    compat.aim_wait_for_server(aim_run.repo)  # none there: returns at once


@pytest.mark.slow
def test_aim_forgets_which_runs_there_are(aim_run: Any) -> None:
    before = aim_run.repo.list_all_runs()
    (Path(aim_run.repo.path) / "meta" / "chunks" / "another").mkdir()
    assert aim_run.repo.list_all_runs() == before
    compat.aim_forget_runs(aim_run.repo)
    assert sorted(aim_run.repo.list_all_runs()) == sorted([*before, "another"])


@pytest.mark.parametrize("token", [None, "isat_token"])
def test_dvclive_tells_whether_it_posts_to_studio(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dvclive = pytest.importorskip("dvclive")
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_STUDIO_TOKEN", "STUDIO_TOKEN", "DVC_STUDIO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("DVC_STUDIO_TOKEN", token)
        monkeypatch.setenv("DVC_STUDIO_URL", "http://127.0.0.1:1")  # nobody is there
        monkeypatch.setenv("DVC_STUDIO_REPO_URL", "local")
    live = dvclive.Live(str(tmp_path / "live"), save_dvc_exp=False, dvcyaml=None)
    assert compat.dvclive_sends_to_studio(live) == bool(token)


@pytest.fixture
def swanlab_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    swanlab = pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = swanlab.Settings(
        terminal=swanlab.Settings.Terminal(proxy_type="none"), probe=swanlab.Settings.Probe(monitor=False)
    )
    run = swanlab.init(mode="offline", log_dir=str(tmp_path / "swanlog"), settings=settings)
    yield run
    run.finish()


def event(data: Any, step: int = 0) -> Any:
    stamp = pytest.importorskip("google.protobuf.timestamp_pb2").Timestamp(seconds=step)
    return pytest.importorskip("swanlab.sdk.internal.bus.events").MetricLogEvent(
        data=data, step=step, timestamp=stamp
    )


def test_swanlab_has_its_values_in_its_file_after_a_flush(swanlab_run: Any) -> None:
    file = next(swanlab_run.dir.glob("*.swanlab"))
    compat.swanlab_emit(swanlab_run, event({"loss": 0.5}, step=3))
    flush = compat.SwanLabFlush(swanlab_run)
    compat.swanlab_emit(swanlab_run, event(flush))
    flush.wait(timeout_seconds=30)
    assert b"loss" in file.read_bytes()


def test_swanlab_says_when_it_cannot_store(swanlab_run: Any, tmp_path: Path) -> None:
    flush = compat.SwanLabFlush(swanlab_run)
    with pytest.raises(TimeoutError, match=r"did not store its values in 0.01 s"):
        flush.wait(timeout_seconds=0.01)
    broken = compat.SwanLabFlush(None)
    compat.swanlab_emit(swanlab_run, event(broken))
    with pytest.raises(AttributeError):
        broken.wait(timeout_seconds=30)


def test_swanlab_drops_what_we_say_that_it_drops(swanlab_run: Any) -> None:
    kinds = pytest.importorskip("swanlab.proto.swanlab.metric.column.v1.column_pb2").ColumnType
    number, words = kinds.COLUMN_TYPE_SCALAR, kinds.COLUMN_TYPE_TEXT
    assert compat.swanlab_takes(swanlab_run, "loss", step=3, column_type=number)
    compat.swanlab_emit(swanlab_run, event({"loss": 0.5}, step=3))
    flush = compat.SwanLabFlush(swanlab_run)
    compat.swanlab_emit(swanlab_run, event(flush))
    flush.wait()
    assert not compat.swanlab_takes(swanlab_run, "loss", step=3, column_type=number)
    assert not compat.swanlab_takes(swanlab_run, "loss", step=4, column_type=words)
    assert compat.swanlab_takes(swanlab_run, "loss", step=2, column_type=number)


def test_swanlab_leaves_no_thread_and_prints_nothing(
    swanlab_run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    before = threading.active_count()
    console = pytest.importorskip("swanlab.sdk.internal.pkg.console")
    compat.swanlab_stop_watching(swanlab_run)
    with compat.swanlab_quiet():
        swanlab_run.finish()
    assert capfd.readouterr() == ("", "")
    assert (threading.active_count(), console.c.quiet) == (before - 2, False)


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "trackio"
    }
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield pytest.importorskip("trackio")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_trackio_turns_media_into_entries_of_rows(trackio: Any, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    pytest.importorskip("PIL.Image").new("RGB", (2, 2)).save(picture)
    table = trackio.Table(columns=["a"], data=[[trackio.Image(str(picture))]])
    made = [trackio.Image(str(picture)), table, trackio.Markdown("a text"), trackio.Histogram([1.0, 2.0])]
    kept = [compat.trackio_medium(one, project="p", run="r", step=3) for one in made]
    assert [one["_type"] for one in kept] == [
        f"trackio.{kind}" for kind in ("image", "table", "markdown", "histogram")
    ]
    assert len(list((tmp_path / "trackio" / "media").rglob("*.png"))) == 2


def test_trackio_copies_an_artifact_and_tells_a_local_run(trackio: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    artifact = trackio.Artifact("notes", type="file")
    artifact.add_file(str(tmp_path / "notes.txt"))
    (entry,) = compat.trackio_manifest(artifact, "p")
    assert (entry["path"], entry["size"]) == ("notes.txt", 5)
    run = trackio.init(project="p", name="r", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    assert compat.trackio_is_local(run)
    trackio.finish()


def test_wandb_has_the_setting_that_flushes_its_file() -> None:
    wandb = pytest.importorskip("wandb")
    assert wandb.Settings.model_fields[compat.WANDB_FLUSH_SETTING].annotation is float


def test_comet_reads_the_head_that_is_written_for_a_killed_experiment(tmp_path: Path) -> None:
    config = pytest.importorskip("comet_ml.config")
    assert config.OFFLINE_EXPERIMENT_MESSAGES_JSON_FILE_NAME == compat.COMET_MESSAGES
    (tmp_path / compat.COMET_MESSAGES).touch()
    compat.write_comet_head(tmp_path, key="k", project="p", workspace=None, is_new=True)
    assert (tmp_path / config.OFFLINE_EXPERIMENT_JSON_FILE_NAME).stat().st_size > 0


@pytest.mark.slow
def test_clearml_can_report_from_a_thread_and_says_whether_it_has_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearml = pytest.importorskip("clearml")
    assert hasattr(clearml.Task, "_report_subprocess_enabled")
    compat.use_clearml_threads()
    assert clearml.Task._report_subprocess_enabled is False
    monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
    assert compat.clearml_has_key()
