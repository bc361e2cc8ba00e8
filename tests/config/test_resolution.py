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

from drivetrain_config import ConfigError, Disagreement, Layers, environ, resolve

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

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count!r}: must be at least 0")


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(0, 5),
    "limit": st.integers(-2, 2),
    "rate": st.floats(0, 1),
    "name": st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=4),
    "fast": st.booleans(),
    "mode": st.sampled_from(["no", "fp16", "bf16"]),
    "sizes": st.lists(st.integers(0, 3), max_size=3).map(tuple),
}
Said = Mapping[str, Any]
SAID = st.fixed_dictionaries({}, optional=VALUES)


def spelled(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write(folder: str, said: Said, ending: str) -> Path:
    path = Path(folder) / f"run{ending}"
    plain = {"probe": {name: list(v) if isinstance(v, tuple) else v for name, v in said.items()}}
    path.write_text(json.dumps(plain) if ending == ".json" else yaml.safe_dump(plain), encoding="utf-8")
    return path


def expected(layers: Mapping[str, Said]) -> tuple[Probe, dict[str, str], set[str]]:
    """The oracle: value and kind of source of each field, and the fields that code and command line disagree on."""
    said: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name in VALUES:
        givers = [kind for kind in KINDS if name in layers[kind]]
        kinds[name] = givers[0] if givers else "default"
        if givers:
            said[name] = layers[givers[0]][name]
    both = layers["code"].keys() & layers["command line"].keys()
    odd = {f"probe.{name}" for name in both if layers["code"][name] != layers["command line"][name]}
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
        Disagreement(field="probe.count", taken=4, overruled=3, flag="--probe-count"),
    )
    assert str(found.disagreements[0]) == (
        "probe.count=4 in code overrules --probe-count on the command line, which says 3"
    )


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
            r"^code: section 'probe' has no field 'cuont', did you mean 'count'\?; its fields: count, limit",
        ),
        ({"count": "4"}, r"^probe\.count='4': must be an integer; take it out of its quotes; from code$"),
        (
            {"mode": "fp17"},
            r"^probe\.mode='fp17': must be one of 'no', 'fp16', 'bf16', did you mean .*; from code$",
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
