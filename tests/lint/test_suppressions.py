import pytest

from lint.linting import ACCELERATOR, codes

BLOCK = "if accelerator.is_main_process:\n    accelerator.gather(\n        x{inner}\n    ){comment}\n"


@pytest.mark.parametrize(
    ("comment", "kept"),
    [
        ("", ["DT101"]),
        ("  # drivetrain: ignore[DT101]", []),
        ("  # drivetrain: ignore[DT301, DT101] it is one process", []),
        ("  # drivetrain: ignore[collective-on-some-ranks]", []),
        ("  # drivetrain: ignore", []),
        ("  # drivetrain: ignore[DT102]", ["DT101"]),
        ("  # ignore[DT101]", ["DT101"]),
        ("  # noqa", ["DT101"]),
    ],
)
def test_a_comment_on_a_line_of_the_finding_suppresses_it(comment: str, kept: list[str]) -> None:
    assert codes(ACCELERATOR + BLOCK.format(inner="", comment=comment)) == kept
    assert codes(ACCELERATOR + BLOCK.format(inner=comment, comment="")) == kept


def test_a_comment_elsewhere_or_in_a_string_does_not() -> None:
    assert codes(ACCELERATOR + "# drivetrain: ignore[DT101]\n" + BLOCK.format(inner="", comment="")) == [
        "DT101"
    ]
    text = "if accelerator.is_main_process:\n    accelerator.gather('# drivetrain: ignore')\n"
    assert codes(ACCELERATOR + text) == ["DT101"]


def test_a_comment_for_the_file_suppresses_all_of_a_rule() -> None:
    source = ACCELERATOR + BLOCK.format(inner="", comment="") + "accelerator.prepare(model)\nmodel(x)\n"
    assert codes(source) == ["DT101", "DT202"]
    assert codes("# drivetrain: file-ignore[DT101]\n" + source) == ["DT202"]
    assert codes("# drivetrain: file-ignore\n" + source) == []
