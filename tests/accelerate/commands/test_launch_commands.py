"""What programs use to start ranks by themselves, against the real one."""

from drivetrain_accelerate.commands import launch_commands as ours
from drivetrain_config import environ


def test_a_path_is_added_behind_those_that_a_variable_lists() -> None:
    with environ.exported(SOME_PATH="/b"):
        assert ours.env_var_path_add("SOME_PATH", "/a") == "/b:/a"
    assert ours.env_var_path_add("SOME_PATH_THAT_IS_NOT_SET", "/a") == "/a"


def test_a_started_process_knows_its_rank() -> None:
    seen: list[tuple[str | None, ...]] = []

    def note(word: str) -> None:
        seen.append((word, environ.read("RANK"), environ.read("LOCAL_RANK")))

    ours.PrepareForLaunch(note, "MULTI_CPU")(1, "x")
    with environ.exported(NODE_RANK="2", NPROC="4"):
        ours.PrepareForLaunch(note)(1, "y")
    assert seen == [("x", "1", "1"), ("y", "9", "1")]
