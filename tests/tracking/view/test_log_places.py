from pathlib import Path

from drivetrain_tracking.view.log_places import find_logs


def make_log(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").touch()
    return folder / "log.jsonl"


def test_a_folder_may_be_a_run_or_hold_many(tmp_path: Path) -> None:
    one, two = make_log(tmp_path / "runs" / "b"), make_log(tmp_path / "runs" / "sweep" / "a")
    assert [(place.label, place.path) for place in find_logs([tmp_path / "runs"])] == [
        ("b", one),
        ("sweep/a", two),
    ]
    assert [place.label for place in find_logs([tmp_path / "runs" / "b"])] == ["b"]


def test_a_log_that_two_folders_hold_is_found_once_and_equal_labels_are_told_apart(tmp_path: Path) -> None:
    make_log(tmp_path / "x" / "run"), make_log(tmp_path / "y" / "run")
    assert len(find_logs([tmp_path, tmp_path / "x"])) == 2
    labels = [place.label for place in find_logs([tmp_path / "x", tmp_path / "y"])]
    assert labels == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]


def test_hidden_folders_links_and_depths_beyond_four_are_left_out(tmp_path: Path) -> None:
    make_log(tmp_path / "runs" / ".cache")
    make_log(tmp_path / "runs" / "1" / "2" / "3" / "4")
    make_log(tmp_path / "runs" / "1" / "2" / "3" / "5" / "6")
    (tmp_path / "runs" / "link").symlink_to(make_log(tmp_path / "other").parent)
    assert [place.label for place in find_logs([tmp_path / "runs"])] == ["1/2/3/4"]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert find_logs([tmp_path / "gone"]) == ()
