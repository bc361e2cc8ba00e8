import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drivetrain_config import ConfigError, Layers, environ, resolve

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    seed: int | None = None
    rate: float = 0.5
    where: Path | None = None
    sizes: Numbers = ()
    fast: bool = False
    api_key: str | None = field(default=None, metadata={"secret": True})

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate={self.rate!r}: must be at least 0")
        if self.api_key == "":
            raise ValueError(f"api_key={self.api_key!r}: must not be empty")


SECTIONS = {"probe": Probe}


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_each_layer_is_kept_with_its_source(tmp_path: Path) -> None:
    file = write(tmp_path, "probe:\n  seed: 1\n  rate: 0.25\n")
    with environ.exported(DRIVETRAIN_PROBE__SEED="2"):
        layers = Layers.read(
            file=file, command_line={"probe": {"seed": "3", "fast": False}}, sections=SECTIONS
        )
    found = {name: [str(e.source) for e in entries] for name, entries in layers.of_section("probe").items()}
    assert found == {
        "seed": [
            "--probe-seed on the command line",
            "DRIVETRAIN_PROBE__SEED in the environment",
            f"{file}:2",
        ],
        "fast": ["--no-probe-fast on the command line"],
        "rate": [f"{file}:3"],
    }


def test_none_on_the_command_line_is_not_said() -> None:
    assert Layers.read(command_line={"probe": {"seed": None}}, sections=SECTIONS).entries == {}


def test_a_worker_reads_the_sources_of_the_launcher(tmp_path: Path) -> None:
    file = write(tmp_path, "probe: {rate: 0.25, sizes: [1, 2]}")
    read = Layers.read(
        file=file, command_line={"probe": {"seed": "3", "where": Path("a")}}, sections=SECTIONS
    )
    with environ.exported(DRIVETRAIN_CONFIG=read.to_json()):
        found = resolve(Probe, section="probe")
    assert found.value == Probe(seed=3, rate=0.25, sizes=(1, 2), where=Path("a"))
    assert str(found.sources["seed"]) == "--probe-seed on the command line"
    assert str(found.sources["sizes"]) == f"{file}:1"
    assert str(found.sources["fast"]) == "default"


def test_a_workers_variable_stands_below_the_launchers_command_line() -> None:
    text = Layers.read(command_line={"probe": {"seed": "3"}}, sections=SECTIONS).to_json()
    with environ.exported(DRIVETRAIN_CONFIG=text, DRIVETRAIN_PROBE__SEED="4", DRIVETRAIN_PROBE__RATE="2"):
        found = resolve(Probe, section="probe").value
    assert (found.seed, found.rate) == (3, 2.0)


def test_a_file_named_in_code_wins_over_the_launchers_field_by_field(tmp_path: Path) -> None:
    launchers = write(tmp_path, "probe: {seed: 1, rate: 0.25}", "launch.yaml")
    mine = write(tmp_path, "[probe]\nseed = 2\n", "mine.toml")
    text = Layers.read(file=launchers, sections=SECTIONS).to_json()
    with environ.exported(DRIVETRAIN_CONFIG=text):
        found = resolve(Probe, section="probe", layers=Layers.of_process(file=mine, sections=SECTIONS))
    assert (found.value.seed, found.value.rate) == (2, 0.25)
    assert str(found.sources["seed"]) == str(mine)


def test_a_secret_reaches_the_worker_but_never_the_text_that_is_handed_down(tmp_path: Path) -> None:
    text = Layers.read(file=write(tmp_path, "probe: {api_key: hush, seed: 1}"), sections=SECTIONS).to_json()
    assert "hush" not in text
    with environ.exported(DRIVETRAIN_CONFIG=text):
        assert resolve(Probe, section="probe").value == Probe(api_key="hush", seed=1)
    with environ.exported(DRIVETRAIN_PROBE__API_KEY="hush"):
        assert Layers.read(sections=SECTIONS).to_json() == '{"settings": []}'
        assert resolve(Probe, section="probe").value.api_key == "hush"


def test_a_secret_that_is_gone_from_the_file_is_missed(tmp_path: Path) -> None:
    file = write(tmp_path, "probe: {api_key: hush}")
    text = Layers.read(file=file, sections=SECTIONS).to_json()
    file.write_text("probe:\n")
    with (
        environ.exported(DRIVETRAIN_CONFIG=text),
        pytest.raises(
            ConfigError, match=r"probe\.api_key was set when the run was launched, and is no longer set"
        ),
    ):
        resolve(Probe, section="probe")


def test_a_secret_on_the_command_line_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"probe\.api_key=\*\*\*: is secret.*DRIVETRAIN_PROBE__API_KEY or in a file"
    ):
        Layers.read(command_line={"probe": {"api_key": "hush"}}, sections=SECTIONS)


def test_a_secret_is_shown_in_no_repr(tmp_path: Path) -> None:
    file = write(tmp_path, "probe: {api_key: hush}")
    assert "hush" not in repr(Layers.read(file=file, sections=SECTIONS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prob:\n  seed: 1\n",
            r"run\.yaml:1: there is no section 'prob'; did you mean probe; sections here: .*probe",
        ),
        ("prob:\n", r"run\.yaml:1: there is no section 'prob'"),
        (
            "probe:\n  sed: 1\n",
            r"run\.yaml:2: section 'probe' has no field 'sed'; did you mean seed; its fields: seed, rate",
        ),
        ("probe:\n  seed: 'yes'\n", r"^probe\.seed='yes': must be an integer or null; from .*run\.yaml:2$"),
        ("probe:\n  seed: true\n", r"^probe\.seed=True: must be an integer or null; from .*run\.yaml:2$"),
        ("probe:\n  rate: null\n", r"^probe\.rate=None: must be a number; from .*run\.yaml:2$"),
        ("rate: 3\n", r"run\.yaml:1: 'rate' stands in no section; it is a field of probe: write it below"),
        ("colour: 3\n", r"run\.yaml:1: 'colour' stands in no section; A file holds sections"),
        ("probe: [1]\n", r"run\.yaml:1: section 'probe' must be a mapping of fields to values, not a list"),
        ("1:\n  2: 3\n", r"there is no section '1'"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layers.read(file=write(tmp_path, text), sections=SECTIONS)


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^probe\.api_key=\*\*\*: must be text or null; from") as caught:
        Layers.read(file=write(tmp_path, "probe: {api_key: [hush]}"), sections=SECTIONS)
    assert caught.value.__cause__ is None


def test_a_mistake_is_told_also_where_another_layer_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "probe: {seed: x}")
    with pytest.raises(ConfigError, match=r"probe\.seed='x'"):
        Layers.read(file=file, command_line={"probe": {"seed": "1"}}, sections=SECTIONS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "DRIVETRAIN_PROB__SEED",
            "1",
            "^DRIVETRAIN_PROB__SEED in the environment: there is no section 'prob'",
        ),
        (
            "DRIVETRAIN_PROBE__SED",
            "1",
            "^DRIVETRAIN_PROBE__SED in the environment: section 'probe' has no field",
        ),
        (
            "DRIVETRAIN_PROBE__SEED",
            "x",
            r"^probe\.seed='x': .*; from DRIVETRAIN_PROBE__SEED in the environment$",
        ),
        (
            "DRIVETRAIN_PROBE_SEED",
            "1",
            "^DRIVETRAIN_PROBE_SEED .* two underscores .* DRIVETRAIN_PROBE__SEED$",
        ),
        ("DRIVETRAIN_SEED", "1", "^DRIVETRAIN_SEED .* sets nothing: .*DRIVETRAIN_PROBE__SEED"),
    ],
)
def test_a_mistake_in_a_variable_is_told_by_its_name(name: str, text: str, message: str) -> None:
    with environ.exported(**{name: text}), pytest.raises(ConfigError, match=message):
        Layers.of_process(sections=SECTIONS)


def test_variables_of_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with environ.exported(DRIVETRAIN_CACHE="x", DRIVETRAIN_PROBE_OTHER="y"):
        assert Layers.of_process(sections=SECTIONS).entries == {}
    assert caplog.messages == [
        "DRIVETRAIN_PROBE_OTHER in the environment sets nothing: section 'probe' has no field 'other'"
    ]


def test_a_mistake_on_the_command_line_is_told_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^probe\.seed='x': .*; from --probe-seed on the command line$"):
        Layers.read(command_line={"probe": {"seed": "x"}}, sections=SECTIONS)


ROW = '"section": "probe", "field": "seed", "where": "", "value": 1'
BROKEN = ["", "{", "[]", "3", "{}", '{"settings": {}}', '{"settings": [{"section": "probe"}]}', "[" * 100_000]


@pytest.mark.parametrize("text", [*BROKEN, f'{{"settings": [{{{ROW}, "kind": "sky"}}]}}'])
def test_a_broken_hand_down_says_what_is_allowed_and_what_to_do(text: str) -> None:
    message = (
        r"DRIVETRAIN_CONFIG=.{0,63} in .* cannot be read: .* a mapping with 'settings', a list .*; unset it"
    )
    with environ.exported(DRIVETRAIN_CONFIG=text), pytest.raises(ConfigError, match=message):
        Layers.of_process()


def test_text_that_is_nested_too_deeply_is_refused_with_its_field() -> None:
    for levels in (101, 5000):
        with pytest.raises(
            ConfigError, match=r"probe\.sizes='\[.*is nested too deeply: 100 levels are allowed; from"
        ):
            Layers.read(command_line={"probe": {"sizes": "[" * levels + "]" * levels}}, sections=SECTIONS)


def test_what_is_handed_down_is_plain_json(tmp_path: Path) -> None:
    layers = Layers.read(command_line={"probe": {"where": Path("a"), "sizes": (1,)}}, sections=SECTIONS)
    assert [row["value"] for row in json.loads(layers.to_json())["settings"]] == ["a", [1]]
