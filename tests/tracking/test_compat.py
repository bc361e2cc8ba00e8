from pathlib import Path

import pytest

from drivetrain_tracking import compat


def test_wandb_has_the_setting_that_flushes_its_file() -> None:
    wandb = pytest.importorskip("wandb")
    assert wandb.Settings.model_fields[compat.WANDB_FLUSH_SETTING].annotation is float


def test_a_message_of_a_wandb_file_is_a_row_or_none() -> None:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    item = messages.HistoryItem(nested_key=["_timestamp"], value_json="1.5")
    row = messages.Record(history=messages.HistoryRecord(item=[item]))
    assert compat.wandb_row(row.SerializeToString()) == {"_timestamp": "1.5"}
    assert compat.wandb_row(messages.Record(run=messages.RunRecord(run_id="a")).SerializeToString()) is None


def test_comet_reads_the_head_that_is_written_for_a_killed_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")  # see platforms/test_comet.py
    config = pytest.importorskip("comet_ml.config")
    assert config.OFFLINE_EXPERIMENT_MESSAGES_JSON_FILE_NAME == compat.COMET_MESSAGES
    (tmp_path / compat.COMET_MESSAGES).touch()
    compat.write_comet_head(tmp_path, key="k", project="p", workspace=None, is_new=True)
    assert (tmp_path / config.OFFLINE_EXPERIMENT_JSON_FILE_NAME).stat().st_size > 0


def test_clearml_can_report_from_a_thread_and_says_whether_it_has_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearml = pytest.importorskip("clearml")
    assert hasattr(clearml.Task, "_report_subprocess_enabled")
    compat.use_clearml_threads()
    assert clearml.Task._report_subprocess_enabled is False
    monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
    assert compat.clearml_has_key()
