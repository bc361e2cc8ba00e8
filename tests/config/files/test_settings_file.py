import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config import ConfigError
from drivetrain_config.files.settings_file import check_json_object, read_file


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "run:\n  seed: 1\n  name: é\n"),
        ("a.yml", "{run: {seed: 1, name: é}}"),
        ("a.toml", '[run]\nseed = 1\nname = "é"\n'),
        ("a.json", '{"run": {"seed": 1, "name": "é"}}'),
        ("a.JSON", '\ufeff{"run": {"seed": 1, "name": "é"}}'),
    ],
)
def test_three_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    assert read_file(write(tmp_path, name, text)).data == {"run": {"seed": 1, "name": "é"}}


def test_yaml_tells_the_line_of_each_field(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "# settings\nrun:\n  seed: 1\n\n  name: x\nstate: {debug: true}\n")
    contents = read_file(path)
    assert contents.where("run") == f"{path}:2"
    assert contents.where("run", "name") == f"{path}:5"
    assert contents.where("state", "debug") == f"{path}:6"
    assert contents.where("run", "other") == f"{path}:2"
    assert contents.where("other") == str(path)


def test_yaml_merges_are_resolved_and_keep_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "run: &base\n  seed: 1\nother:\n  <<: *base\n  name: x\n")
    contents = read_file(path)
    assert contents.data["other"] == {"seed": 1, "name": "x"}
    assert contents.where("other", "seed") == f"{path}:3"
    assert contents.where("other", "name") == f"{path}:5"


def test_an_alias_inside_itself_does_not_hang(tmp_path: Path) -> None:
    contents = read_file(write(tmp_path, "a.yaml", "run:\n  loop: &a [*a]\n"))
    assert contents.where("run", "loop").endswith("a.yaml:2")


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    assert read_file(write(tmp_path, "a.yaml", text)).data == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "run:\n  seed: 1\n  seed: 2\n", r"a\.yaml:3: says 'seed' again, after line 2; keep one"),
        ("a.yaml", "run:\n- {a: 1, a: 2}\n", r"a\.yaml:2: says 'a' again, after line 2"),
        ("a.json", '{"run": {"seed": 1, "seed": 2}}', r"a\.json: says 'seed' twice"),
        ("a.toml", "[run]\nseed = 1\nseed = 2\n", r"a\.toml: cannot be read as TOML: .*line 3"),
        ("a.yaml", "run:\n  seed: [1\nb: 2", r"a\.yaml:\d+: cannot be read as YAML"),
        (
            "a.yaml",
            "run: !!python/object:os.system x",
            r"a\.yaml:1: cannot be read as YAML: could not determine",
        ),
        ("a.yaml", "run: \x01", r"a\.yaml: cannot be read as YAML"),
        ("a.json", '{"run":\n{,}}', r"a\.json:2: cannot be read as JSON"),
        ("a.yaml", "- run", r"a\.yaml: must hold sections, as in .*; it holds a list"),
        ("a.json", "3", r"a\.json: must hold sections.* a single value of type int"),
        ("a.ini", "", r"a\.ini: a file of settings ends in \.yaml, \.yml, \.toml or \.json, not in '\.ini'"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_file(write(tmp_path, name, text))


@pytest.mark.parametrize("levels", [102, 5000])
@pytest.mark.parametrize(
    ("name", "start", "end"),
    [("a.yaml", "[", "]"), ("a.yaml", "{a: ", "}"), ("a.json", "[", "]"), ("a.json", '{"a":', "}")],
)
def test_a_file_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, name: str, start: str, end: str, levels: int
) -> None:
    path = write(tmp_path, name, f'{{"run": {start * levels}1{end * levels}}}')
    with pytest.raises(ConfigError, match=r"a\.\w+: is nested too deeply: it may have 100 levels at most"):
        read_file(path)


# The parser takes a time that grows with the square of the levels: minutes for these.
def test_yaml_is_read_no_further_than_to_the_first_level_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: is nested too deeply"):
        read_file(write(tmp_path, "a.yaml", f"run: {'[' * 200_000}"))


@pytest.mark.parametrize("text", [f"run = {'[' * 5000}{']' * 5000}", f"{'a.' * 102}b = 1"])
def test_toml_that_is_nested_too_deeply_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "a.toml", text)
    with pytest.raises(ConfigError, match=r"a\.toml: is nested too deeply"):
        read_file(path)


@pytest.mark.parametrize("name", ["a.toml", "a.json", "a.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "pipe":
            os.mkfifo(name)
        elif kind == "folder":
            Path(name).mkdir()
        elif kind == "socket":
            listening.bind(name)
        else:
            Path(name).symlink_to("/dev/zero")
        for read in (read_file, check_json_object):
            with pytest.raises(ConfigError, match=rf"^{name}: is no regular file, but a pipe, a folder"):
                read(Path(name))


@pytest.mark.parametrize("levels", [102, 5000])
def test_an_object_that_is_nested_too_deeply_is_refused(tmp_path: Path, levels: int) -> None:
    path = write(tmp_path, "a.json", '{"a":' * levels + "1" + "}" * levels)
    with pytest.raises(ConfigError, match=r"a\.json: is nested too deeply"):
        check_json_object(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(write(tmp_path, "a.json", '{"run": {}}'))
    assert read_file(link).data == {"run": {}}


@pytest.mark.parametrize(
    ("written", "in_yaml_1_1"),
    [
        ("010", "8"),
        ("-017", "-15"),
        ("0_7", "7"),
        ("1:30", "90"),
        ("1:30:15", "5415"),
        ("1:30.5", "90.5"),
        ("1__0", "10"),
        ("0o10", "text"),
    ],
)
def test_a_number_that_versions_of_yaml_read_apart_is_refused(
    tmp_path: Path, written: str, in_yaml_1_1: str
) -> None:
    message = rf"a\.yaml:3: {written} is {in_yaml_1_1} in YAML 1\.1 and something else .*quotes if it is text"
    for line in (written, f"[1, {written}]", f"{{{written}: 1}}"):
        with pytest.raises(ConfigError, match=message):
            read_file(write(tmp_path, "a.yaml", f"run:\n  cpu: true\n  seed: {line}\n"))
    assert read_file(write(tmp_path, "a.yaml", f"run: {{name: '{written}'}}")).data["run"]["name"] == written


@given(st.integers(-(10**6), 10**6), st.sampled_from(["d", "_d", "#x", "#b"]))
def test_every_other_number_is_what_python_reads(number: int, form: str) -> None:
    written = format(number, form)
    with tempfile.TemporaryDirectory() as folder:
        assert (
            read_file(write(Path(folder), "a.yaml", f"run: {{seed: {written}}}")).data["run"]["seed"]
            == number
        )


def test_words_for_true_and_false_numbers_and_dates_are_what_their_field_takes(tmp_path: Path) -> None:
    text = "run: {a: yes, b: off, c: 1_000, d: 1_0.5, e: .inf, f: 2024-01-01, g: 0, h: +3, i: 1e-4, j: 'no'}"
    assert read_file(write(tmp_path, "a.yaml", text)).data["run"] == {
        "a": True,
        "b": False,
        "c": 1000,
        "d": 10.5,
        "e": float("inf"),
        "f": "2024-01-01",
        "g": 0,
        "h": 3,
        "i": "1e-4",
        "j": "no",
    }


def test_a_file_that_is_not_there_is_told_with_the_nearest_that_is(tmp_path: Path) -> None:
    write(tmp_path, "train.yaml", "")
    with pytest.raises(ConfigError, match=r"trian\.yaml: no such file; did you mean .*train\.yaml$"):
        read_file(tmp_path / "trian.yaml")
    with pytest.raises(ConfigError, match=r"no such file$"):
        read_file(tmp_path / "nowhere" / "x.yaml")


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_file(path)


def test_without_pyyaml_a_yaml_file_names_the_extra(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "run: {seed: 1}")
    source = (
        "import pathlib, sys; sys.modules['yaml'] = None\n"
        "from drivetrain_config import ConfigError\n"
        "from drivetrain_config.files.settings_file import read_file\n"
        "try:\n    read_file(pathlib.Path(sys.argv[1]))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", source, str(path)],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert (
        "YAML needs PyYAML: pip install 'drivetrain-config[yaml]', or write TOML or JSON" in finished.stdout
    )


def test_another_programs_file_is_translated_by_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_format.py").write_text(
        "from dataclasses import replace\n"
        "def translate(file):\n"
        "    return replace(file, data={'run': {'seed': file.data['s']}}) if 's' in file.data else None\n"
    )
    info = tmp_path / "other_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.file_formats]\nother = other_format:translate\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_file(write(tmp_path, "other.json", '{"s": 3}')).data == {"run": {"seed": 3}}
    assert read_file(write(tmp_path, "ours.json", '{"run": {"seed": 4}}')).data == {"run": {"seed": 4}}


def test_an_accelerate_file_names_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "default_config.json", '{"compute_environment": "LOCAL_MACHINE"}')
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where nothing is installed
    with pytest.raises(ConfigError, match=r"is an Accelerate file: install drivetrain-migration"):
        read_file(path)
