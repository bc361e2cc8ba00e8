import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drivetrain_config import ConfigError
from drivetrain_config.settings.file_review import review_file
from drivetrain_config.settings.plugin_names import check_plugins, plugin_names
from drivetrain_config.settings.schema import specs
from drivetrain_config.source import Source

GROUP = "drivetrain.engines"
FLAG = Source("command line", "--engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine: str = field(default="auto", metadata={"plugins": GROUP, "other_words": ("auto",)})
    writers: tuple[str, ...] = field(
        default=(), metadata={"plugins": GROUP, "other_words": ("all", "module:Class")}
    )
    missing: str | None = field(default=None, metadata={"plugins": "drivetrain.nobody"})
    colour: str = "red"


SPECS = {spec.name: spec for spec in specs(Settings, "probe")}


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with two engines."""
    info = tmp_path / "engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nturbo = os:sep\ndiesel = os:sep\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        yield


def notes(name: str, value: object, script: str | None = None) -> list[str]:
    return check_plugins(SPECS[name], value, FLAG, script=script)


def test_a_field_carries_its_group_and_its_other_words() -> None:
    assert (SPECS["engine"].plugins, SPECS["engine"].other_words) == (GROUP, ("auto",))
    assert (SPECS["colour"].plugins, SPECS["colour"].other_words) == (None, ())
    assert plugin_names(GROUP, ("auto",)) == ("auto", "diesel", "turbo")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "auto"),
        ("engine", "turbo"),
        ("writers", ("all", "diesel", "mine.writers:Writer")),
        ("missing", "anything"),  # nothing is installed here, as where the launcher stands alone
        ("missing", None),
        ("colour", "turob"),
    ],
)
@pytest.mark.slow
def test_what_is_installed_or_named_beside_it_passes(name: str, value: object) -> None:
    assert notes(name, value) == []
    assert notes(name, value, "print('trains')") == []


@pytest.mark.parametrize("script", [None, "print('trains')"])
@pytest.mark.parametrize("written", ["turob", "Turbo", "TURBO"])
def test_a_misspelt_name_is_refused_with_the_nearest(written: str, script: str | None) -> None:
    message = (
        f"probe.engine='{written}': no installed package provides it; did you mean turbo; say one of auto, diesel, "
        "turbo; from --engine on the command line."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        notes("engine", written, script)


def test_each_name_of_a_list_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"probe\.writers='disel': .* did you mean diesel"):
        notes("writers", ("turbo", "disel"))
    (note,) = notes("writers", ["turbo", "mine"])
    assert note.startswith(
        "probe.writers='mine': no package provides it in this environment, which has all, "
    )


def test_a_name_like_no_other_needs_the_script_to_contain_it() -> None:
    with pytest.raises(
        ConfigError, match=r"probe\.engine='mine': no installed package provides it; say one of auto"
    ):
        notes("engine", "mine", "print('mines')")
    assert len(notes("engine", "mine", "register('mine', Mine)")) == 1
    assert len(notes("engine", "mine")) == 1


def test_a_name_that_the_script_contains_passes_though_it_resembles_another() -> None:
    assert len(notes("engine", "turbo-2", "register('turbo_2', Turbo)")) == 1


def test_a_colon_names_no_class_where_none_may_be_given() -> None:
    with pytest.raises(ConfigError, match="no installed package provides it"):
        notes("engine", "mine.engines:Engine", "print('trains')")


def test_a_file_is_reviewed_with_lines_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("probe:\n  engine: turob\n  writers: [mine]\n")
    review = review_file(path, sections={"probe": Settings})
    (problem,), (note,) = review.problems, review.notices
    assert problem.startswith("probe.engine='turob': no installed package provides it; did you mean turbo")
    assert f"from {path}:2" in problem
    assert note.endswith(f"from {path}:3")
