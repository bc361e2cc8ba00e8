import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivetrain_dispatch.planning.bandwidth import default_cache, measure_rates, remembered
from drivetrain_dispatch.planning.pipeline_model import Bandwidths


def make_file(folder: Path, size_bytes: int) -> Path:
    path = folder / "weights"
    path.write_bytes(os.urandom(size_bytes))
    return path


def test_rates_are_measured_once_and_kept(tmp_path: Path) -> None:
    cache, file = tmp_path / "deep" / "rates.json", make_file(tmp_path, 9 * 2**20 + 5)
    first = measure_rates("cpu", disk_path=file, cache=cache)
    assert all(math.isfinite(rate) and rate > 1e5 for rate in (first.to_device, first.from_disk))
    written = cache.read_bytes()
    assert measure_rates("cpu", disk_path=file, cache=cache) == first  # to the last digit: it was read
    assert cache.read_bytes() == written
    assert [path.name for path in cache.parent.iterdir()] == ["rates.json"]


def test_what_is_kept_is_taken(tmp_path: Path) -> None:
    cache, file = tmp_path / "rates.json", make_file(tmp_path, 2**23)
    measure_rates("cpu", disk_path=file, cache=cache)
    known = json.loads(cache.read_text())
    for numbers in known.values():
        numbers["bytes_per_second"] = 123.0
    cache.write_text(json.dumps(known))
    assert measure_rates("cpu", disk_path=file, cache=cache) == Bandwidths(to_device=123.0, from_disk=123.0)


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    assert measure_rates("cpu", disk_path=folder, cache=tmp_path / "rates.json").from_disk > 1e5
    assert list(folder.iterdir()) == []
    # Without one, the disk of the cache is measured, though its folder is not there yet.
    assert measure_rates("cpu", cache=tmp_path / "none" / "yet" / "rates.json").from_disk > 1e5


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]", "null", '{"a": 1}', "\x00" * 100, "nan", "zero", "text", "empty"]
)
def test_a_damaged_cache_is_measured_anew(damage: str, tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    wrong = {"nan": math.nan, "zero": 0, "text": "fast"}
    if damage in wrong:
        cache.write_text(json.dumps({json.dumps(["what"]): {"speed": wrong[damage]}}))
    elif damage == "empty":
        cache.write_text(json.dumps({json.dumps(["what"]): {}}))
    else:
        cache.write_text(damage)
    assert remembered(cache, ["what"], ["speed"], lambda: [7.0]) == [7.0]
    assert json.loads(cache.read_text())[json.dumps(["what"])] == {"speed": 7.0}


def test_bytes_that_are_no_text_are_damage_too(tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    cache.write_bytes(b"\xff\xfe\x80")
    assert remembered(cache, ["what"], ["speed"], lambda: [7.0]) == [7.0]


def test_each_device_and_version_has_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    assert remembered(cache, ["gpu", "1"], ["speed"], lambda: [1.0]) == [1.0]
    assert remembered(cache, ["gpu", "2"], ["speed"], lambda: [2.0]) == [2.0]
    assert remembered(cache, ["gpu", "1"], ["speed"], lambda: [3.0]) == [1.0]
    assert remembered(cache, ["gpu", "1"], ["speed", "more"], lambda: [3.0, 4.0]) == [3.0, 4.0]


def test_where_nothing_can_be_written_it_is_measured_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    numbers = iter([1.0, 2.0])
    cache = tmp_path / "file" / "rates.json"  # below what is no folder
    for expected in (1.0, 2.0):
        assert remembered(cache, ["what"], ["speed"], lambda: [next(numbers)]) == [expected]


REMEMBER = """
import json, sys
from pathlib import Path
from typing import Any
from drivetrain_dispatch.planning.bandwidth import remembered
cache = Path(sys.argv[1])
for turn in range(50):
    remembered(cache, [sys.argv[2], str(turn)], ["speed"], lambda: [1.0])
    json.loads(cache.read_text())  # whole at any time
"""


def test_processes_that_write_at_once_leave_a_whole_file(python: str, tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    workers = [subprocess.Popen([python, "-c", REMEMBER, str(cache), str(number)]) for number in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk_path='.*nowhere' is missing: name a file"):
        measure_rates("cpu", disk_path=tmp_path / "nowhere", cache=tmp_path / "rates.json")
    with pytest.raises(ValueError, match=r"has less than 4194304 bytes: name a larger file"):
        measure_rates("cpu", disk_path=make_file(tmp_path, 100), cache=tmp_path / "rates.json")


def test_the_default_lies_in_the_users_caches() -> None:
    assert default_cache().is_relative_to(Path.home())
    assert default_cache().parts[-2:] == ("drivetrain", "rates.json")


@pytest.mark.parametrize(
    "given", [{"to_device": -1}, {"from_disk": 0}, {"to_device": "25GB"}, {"from_disk": True}]
)
def test_rates_are_numbers_above_0(given: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"Bandwidths: {next(iter(given))}=.*: must be a number of bytes a second above 0"
    ):
        Bandwidths(**({"to_device": 25e9, "from_disk": 3e9} | given))
