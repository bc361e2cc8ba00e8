import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters import ClusterError
from drivetrain_clusters.request_values import OptionReader, memory_bytes

WORD = re.compile("[a-z]+")


def reader(options: dict[str, str]) -> OptionReader:
    return OptionReader("mars", options, ("many", "one", "port", "x"))


def test_an_unknown_option_names_the_nearest() -> None:
    message = r"mars has no such option; did you mean image.* there are image, port"
    with pytest.raises(ClusterError, match=message):
        OptionReader("mars", {"imge": "x"}, ("port", "image"))


def test_items_stand_between_commas_and_each_is_checked() -> None:
    assert reader({"many": "a, b"}).several("many", WORD, "a word") == ("a", "b")
    with pytest.raises(
        ClusterError, match="--option many=a,,b: '' must be a word; several stand between commas"
    ):
        reader({"many": "a,,b"}).several("many", WORD, "a word")


def test_a_pattern_matches_the_whole_value() -> None:
    with pytest.raises(ClusterError, match="must be a word"):
        reader({"one": "abc\n"}).matching("one", WORD, "a word")


def test_numbers_have_a_range() -> None:
    assert reader({"port": "80"}).number("port", least=1) == 80
    assert reader({}).number("port", least=1) is None
    for text in ("0", "x", "-1", "99999999999", "1.5"):
        with pytest.raises(ClusterError, match=f"--option port={text}: must be a number from 1 to 9"):
            reader({"port": text}).number("port", least=1, most=9)


def test_truth_is_said_in_words() -> None:
    assert reader({"x": "Yes"}).truth("x")
    assert not reader({}).truth("x")
    with pytest.raises(ClusterError, match="--option x=maybe: say true or false"):
        reader({"x": "maybe"}).truth("x")


@pytest.mark.parametrize("text", ["64", "64G", "", "GB", "-1GB", "0GB", "1e3GB", "64GB; rm -rf /", "٣GB"])
def test_a_size_of_another_form_is_refused_with_the_allowed_one(text: str) -> None:
    with pytest.raises(ClusterError, match="say a number and a unit, such as 64GB"):
        memory_bytes(text)


@given(st.integers(1, 10**6), st.sampled_from(["KB", "mb", "GB", " TB", "kib", "MiB", "GiB", "TiB"]))
def test_units_are_powers_of_1000_or_1024(count: int, unit: str) -> None:
    base, prefix = 1024 if "i" in unit else 1000, unit.strip()[0].upper()
    assert memory_bytes(f"{count}{unit}") == count * base ** ("KMGT".index(prefix) + 1)
