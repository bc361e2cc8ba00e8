from pathlib import Path

import pytest

from drivetrain_tracking.view.media import DOWNLOAD, content_type_of, find_medium_file


def test_a_file_in_the_runs_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").touch()
    assert find_medium_file(tmp_path, "media/a.png") == tmp_path / "media" / "a.png"


@pytest.mark.parametrize(
    "file", ["../secret", "/etc/passwd", "link", "folder", "gone", "nul\0l", "circle", ""]
)
def test_other_files_are_not(tmp_path: Path, file: str) -> None:
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (run / "link").symlink_to(tmp_path / "secret")
    (run / "circle").symlink_to(run / "circle")
    assert find_medium_file(run, file) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.PNG", "image/png"), ("a.wav", "audio/wav"), ("a.svg", DOWNLOAD), ("a.html", DOWNLOAD)],
)
def test_what_could_run_a_script_is_a_download(name: str, kind: str) -> None:
    assert content_type_of(Path(name)) == kind
