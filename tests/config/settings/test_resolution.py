import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config import ConfigError, Layers, SettingConflict, Source, environ, resolve
from drivetrain_config.source import Entry

KINDS = ("code", "command line", "environment", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    count: int = 7
    limit: int | None = None
    rate: float = 0.5
    name: str = "plain"
    fast: bool = False
    mode: Literal["no", "fp16", "bf16"] = "no"
    sizes: tuple[int, ...] = (1,)
    folder: Path = Path("runs")

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count!r}: must be at least 0")


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(4, 8),  # as for every field, the default among them
    "limit": st.integers(-2, 2),
    "rate": st.sampled_from([0.5, 0.25, 1.0]) | st.floats(0, 1),
    "name": st.just("plain") | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=4),
    "fast": st.booleans(),
    "mode": st.sampled_from(["no", "fp16", "bf16"]),
    "sizes": st.just((1,)) | st.lists(st.integers(0, 3), max_size=3).map(tuple),
    "folder": st.sampled_from([Path("runs"), Path("elsewhere")]),
}
Said = Mapping[str, Any]
SAID = st.fixed_dictionaries({}, optional=VALUES)


def spelled(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plainly(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def write(folder: str, said: Said, ending: str) -> Path:
    path = Path(folder) / f"run{ending}"
    plain = {"probe": {name: plainly(value) for name, value in said.items()}}
    path.write_text(json.dumps(plain) if ending == ".json" else yaml.safe_dump(plain), encoding="utf-8")
    return path


def expected(layers: Mapping[str, Said]) -> tuple[Probe, dict[str, str], set[str]]:
    """The oracle: value and kind of source of each field, and the fields that code and another layer disagree on."""
    said: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    odd: set[str] = set()
    for name in VALUES:
        in_code = layers["code"].get(name)
        gives_way = in_code == getattr(Probe(), name)
        order = (*KINDS[1:], "code") if gives_way else KINDS
        givers = [kind for kind in order if name in layers[kind]]
        kinds[name] = givers[0] if givers else "default"
        if not givers:
            continue
        said[name] = layers[givers[0]][name]
        against = (
            givers[0] if gives_way else "command line"
        )  # what code gave way to, or the flag that it overrules
        if in_code is not None and layers[against].get(name, in_code) != in_code:
            odd.add(f"probe.{name}")
    return Probe(**said), kinds, odd


@given(st.fixed_dictionaries(dict.fromkeys(KINDS, SAID)), st.sampled_from([".json", ".yaml"]), st.booleans())
def test_each_field_comes_from_the_highest_layer_that_says_it(
    layers: Mapping[str, Said], ending: str, as_worker: bool
) -> None:
    variables = {
        environ.override_name("probe", name): spelled(v) for name, v in layers["environment"].items()
    }
    with tempfile.TemporaryDirectory() as folder, environ.exported(**variables):
        read = Layers.read(
            file=write(folder, layers["file"], ending),
            command_line={"probe": {name: spelled(v) for name, v in layers["command line"].items()}},
            sections={"probe": Probe},
        )
    with environ.exported(DRIVETRAIN_CONFIG=read.to_json()):
        found = resolve(Probe, section="probe", code=layers["code"], layers=None if as_worker else read)
    value, kinds, odd = expected(layers)
    assert found.value == value
    assert {name: source.kind for name, source in found.sources.items()} == kinds
    assert {each.field for each in found.disagreements} == odd


def test_none_in_code_is_not_said() -> None:
    layers = Layers.read(command_line={"probe": {"count": "3"}}, sections={"probe": Probe})
    found = resolve(Probe, section="probe", code={"count": None, "limit": None}, layers=layers)
    assert (found.value.count, found.sources["count"].kind) == (3, "command line")
    assert found.sources["limit"].kind == "default"


def test_none_spelled_out_below_code_is_a_value() -> None:
    with environ.exported(DRIVETRAIN_PROBE__LIMIT="none"):
        found = resolve(Probe, section="probe")
    assert (found.value.limit, found.sources["limit"].kind) == (None, "environment")


def test_code_against_the_command_line_is_a_disagreement_that_names_both() -> None:
    layers = Layers.read(command_line={"probe": {"count": "3", "mode": "fp16"}}, sections={"probe": Probe})
    found = resolve(Probe, section="probe", code={"count": 4, "mode": "fp16"}, layers=layers)
    assert found.disagreements == (
        SettingConflict(
            field="probe.count",
            taken=4,
            taken_from=Source("code"),
            overruled=3,
            overruled_from=Source("command line", "--probe-count"),
        ),
    )
    assert str(found.disagreements[0]) == (
        "probe.count=4 in code overrules --probe-count on the command line, which says 3"
    )


def test_code_may_name_who_chose_a_value_for_the_program() -> None:
    layers = Layers.read(command_line={"probe": {"count": "3", "rate": "2.0"}}, sections={"probe": Probe})
    chosen = {
        "count": Entry(4, Source("code", "the plugin")),
        "rate": Entry(1.5, Source("default", "the library's default")),
        "fast": Entry(True, Source("default", "the library's default")),
        "limit": Entry("5", Source("environment", "LIMIT")),
    }
    found = resolve(Probe, section="probe", code=chosen, layers=layers)
    assert (found.value.count, str(found.sources["count"])) == (4, "the plugin")
    assert (found.value.rate, found.sources["rate"].kind) == (2.0, "command line")
    assert (found.value.fast, str(found.sources["fast"])) == (True, "the library's default")
    assert (found.value.limit, str(found.sources["limit"])) == (5, "LIMIT in the environment")
    assert [str(each) for each in found.disagreements] == [
        "probe.count=4 of the plugin overrules --probe-count on the command line, which says 3"
    ]


def test_a_default_in_code_gives_way_to_every_other_layer_and_says_so(tmp_path: Path) -> None:
    file = write(str(tmp_path), {"count": 1, "fast": True, "folder": Path("a"), "sizes": (2,)}, ".json")
    code = {"count": 7, "fast": False, "folder": "runs", "sizes": [1], "rate": 0.5, "name": "plain"}
    with environ.exported(DRIVETRAIN_PROBE__COUNT="2", DRIVETRAIN_PROBE__NAME="plain"):
        layers = Layers.read(file=file, command_line={"probe": {"fast": "true"}}, sections={"probe": Probe})
        found = resolve(Probe, section="probe", code=code, layers=layers)
    value = found.value
    assert (value.count, value.fast, value.folder, value.sizes) == (2, True, Path("a"), (2,))
    assert (found.sources["rate"].kind, found.sources["name"].kind) == ("code", "environment")
    assert [str(each) for each in found.disagreements][:2] == [
        "probe.count=2 from DRIVETRAIN_PROBE__COUNT in the environment overrules 7 in code, which is the default and "
        "so counts as not given",
        "probe.fast=True from --probe-fast on the command line overrules False in code, which is the default and so "
        "counts as not given",
    ]
    fields = [each.field.removeprefix("probe.") for each in found.disagreements]
    assert fields == ["count", "fast", "sizes", "folder"]


def test_a_secret_that_gives_way_is_not_shown() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Login:
        token: str = field(default="guest", metadata={"secret": True})

    with environ.exported(DRIVETRAIN_LOGIN__TOKEN="hush"):
        found = resolve(Login, section="login", code={"token": "guest"})
    assert found.value.token == "hush"
    assert "hush" not in str(found.disagreements[0])
    assert "guest" not in str(found.disagreements[0])


def test_a_file_or_variable_that_is_overruled_is_no_disagreement(tmp_path: Path) -> None:
    file = write(str(tmp_path), {"count": 1}, ".json")
    with environ.exported(DRIVETRAIN_PROBE__COUNT="2"):
        layers = Layers.read(file=file, command_line={"probe": {"count": "3"}}, sections={"probe": Probe})
    assert resolve(Probe, section="probe", code={"count": 3}, layers=layers).disagreements == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            {"cuont": 1},
            r"^code: section 'probe' has no field 'cuont'; did you mean count; its fields: count, limit",
        ),
        ({"count": "4"}, r"^probe\.count='4': must be an integer; take it out of its quotes; from code$"),
        (
            {"mode": "fp17"},
            r"^probe\.mode='fp17': must be one of 'no', 'fp16', 'bf16'; did you mean .*; from code$",
        ),
        ({"count": -1}, r"^probe\.count=-1: must be at least 0; from code$"),
    ],
)
def test_a_mistake_in_code_is_told(code: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(Probe, section="probe", code=code)


def test_a_value_outside_its_range_is_told_with_its_source(tmp_path: Path) -> None:
    file = write(str(tmp_path), {"count": -1}, ".yaml")
    with pytest.raises(ConfigError, match=r"^probe\.count=-1: must be at least 0; from .*run\.yaml:2$"):
        resolve(Probe, section="probe", layers=Layers.read(file=file, sections={"probe": Probe}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strict:
    path: Path
    key: str = field(default="fine", metadata={"secret": True})

    def __post_init__(self) -> None:
        if self.key != "fine":
            raise ValueError(f"key={self.key!r}: must be fine")
        if str(self.path) == "odd":
            raise ValueError("path and key do not fit together")


def test_a_field_without_default_must_be_given() -> None:
    with pytest.raises(
        ConfigError,
        match=r"strict\.path has no default .* must be a path; .* by --strict-path, DRIVETRAIN_STRICT__PATH, or in",
    ):
        resolve(Strict, section="strict")


def test_a_secret_outside_its_range_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^strict\.key=\*\*\*: must be fine; from code$") as caught:
        resolve(Strict, section="strict", code={"path": "a", "key": "hush"})
    assert caught.value.__cause__ is None


def test_a_section_may_raise_a_config_error_of_its_own() -> None:
    @dataclass(frozen=True)
    class Own:
        size: int = 1

        def __post_init__(self) -> None:
            raise ConfigError("said in full")

    with pytest.raises(ConfigError, match=r"^said in full$"):
        resolve(Own, section="own")


def test_a_check_that_names_no_field_is_told_with_its_section() -> None:
    with pytest.raises(ConfigError, match=r"^section 'strict': path and key do not fit together$"):
        resolve(Strict, section="strict", code={"path": "odd"})
