from dataclasses import dataclass, field
from pathlib import Path

from drivetrain_config.settings.file_review import review_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    width: int = field(default=1, metadata={"help": "a width"})
    height: int = field(default=1, metadata={"help": "a height"})
    password: str | None = field(default=None, metadata={"help": "a secret", "secret": True})

    def __post_init__(self) -> None:
        if self.width > self.height:
            raise ValueError(f"width={self.width!r}: must be at most height={self.height}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needing:
    name: str = field(metadata={"help": "a name"})
    size: int = field(default=1, metadata={"help": "a size"})


SECTIONS = {"probe": Settings, "needing": Needing}


def problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return tuple(each.replace(f"{tmp_path}/", "") for each in review_file(path, sections=SECTIONS).problems)


def test_every_problem_is_found_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    found = problems(tmp_path, "probe:\n  widht: 2\n  height: tall\nneding:\n  size: 1\nsize: 3\n")
    assert [each.partition(";")[0] for each in found] == [
        "x.yaml:2: section 'probe' has no field 'widht'",
        "probe.height='tall': must be an integer",
        *[each.partition(";")[0] for each in found[2:]],
    ]
    assert "has no field 'widht'; did you mean width; its fields" in found[0]
    assert found[1].endswith("from x.yaml:3")
    assert found[2].startswith("x.yaml:4: there is no section 'neding'; did you mean needing")
    assert found[3].startswith("x.yaml:6: 'size' stands in no section; it is a field of needing")
    assert len(found) == 4


def test_a_section_is_checked_as_a_whole(tmp_path: Path) -> None:
    assert problems(tmp_path, "probe:\n  width: 3\n  height: 2\n") == (
        "probe.width=3: must be at most height=2; from x.yaml:2",
    )


def test_a_field_that_a_flag_may_give_need_not_be_in_the_file(tmp_path: Path) -> None:
    assert problems(tmp_path, "needing:\n  size: 2\n") == ()


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "probe:\n  password: 123456\n")
    assert "123456" not in problem
    assert "probe.password=***" in problem


def test_what_cannot_be_parsed_is_the_only_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "probe: [\n")
    assert "cannot be read as YAML" in problem
    assert review_file(tmp_path / "nowhere.yaml").problems[0].endswith("no such file")


def test_a_valid_file_counts_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("probe: {width: 1, height: 2}\nneeding:\n")
    review = review_file(path, sections=SECTIONS)
    assert (review.problems, review.num_settings) == ((), 2)
