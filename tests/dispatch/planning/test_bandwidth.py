import json
import math
from pathlib import Path
from typing import Any

import pytest

from dispatch.models import run_threads
from drivetrain_dispatch.planning.bandwidth import default_cache, measure_rates, remembered
from drivetrain_dispatch.planning.pipeline_model import Bandwidths


def test_rates_are_measured_once_and_kept(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "rates.json"  # whose disk is measured, though its folder is not there yet
    first = measure_rates("cpu", cache=cache)
    assert all(math.isfinite(rate) and rate > 1e5 for rate in (first.to_device, first.from_disk))
    assert measure_rates("cpu", cache=cache) == first  # to the last digit: it was read
    assert [path.name for path in cache.parent.iterdir()] == ["rates.json"]
    assert list(tmp_path.iterdir()) == [cache.parent]
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), 123.0)))
    assert measure_rates("cpu", cache=cache) == Bandwidths(to_device=123.0, from_disk=123.0)


DAMAGED = {
    "nothing": b"",
    "cut": b"{",
    "a list": b"[1]",
    "null": b"null",
    "bytes that are no text": b"\xff\xfe\x80",
    "zeros": b"\x00" * 100,
    **{
        name: json.dumps({json.dumps(["what"]): value}).encode()
        for name, value in {"no number": math.nan, "zero": 0, "text": "fast", "an object": {}}.items()
    },
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_cache_is_measured_anew(content: bytes, tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    cache.write_bytes(content)
    assert remembered(cache, ["what"], lambda: 7.0) == 7.0
    assert json.loads(cache.read_text())[json.dumps(["what"])] == 7.0


def test_each_device_and_version_has_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"
    for what, measured, expected in (("1", 1.0, 1.0), ("2", 2.0, 2.0), ("1", 3.0, 1.0)):
        assert remembered(cache, ["gpu", what], lambda measured=measured: measured) == expected


def test_where_nothing_can_be_written_it_is_measured_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for measured in (1.0, 2.0):
        assert (
            remembered(tmp_path / "file" / "rates.json", ["what"], lambda measured=measured: measured)
            == measured
        )


def test_those_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    cache = tmp_path / "rates.json"

    def remember(number: int) -> None:
        for turn in range(50):
            remembered(cache, [str(number), str(turn)], lambda: 1.0)
            json.loads(cache.read_text())  # whole at any time

    run_threads(remember, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


def test_the_default_lies_in_the_users_caches() -> None:
    assert default_cache().is_relative_to(Path.home())
    assert default_cache().parts[-2:] == ("drivetrain", "rates.json")


@pytest.mark.parametrize(
    "given", [{"to_device": -1}, {"from_disk": 0}, {"to_device": "25GB"}, {"from_disk": True}]
)
def test_rates_are_numbers_above_0(given: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"Bandwidths: {next(iter(given))}=.*: must be a number of bytes a second"
    ):
        Bandwidths(**({"to_device": 25e9, "from_disk": 3e9} | given))
