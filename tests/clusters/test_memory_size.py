import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters import ClusterError
from drivetrain_clusters.memory_size import memory_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GB", 64 * 10**9),
        ("64 GiB", 64 * 2**30),
        ("1.5kib", 1536),
        ("512mb", 512 * 10**6),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["64", "64G", "", "GB", "-1GB", "0GB", "1e3GB", "64GB; rm -rf /", "٣GB"])
def test_another_form_is_refused_with_the_allowed_one(text: str) -> None:
    with pytest.raises(ClusterError, match="say a number and a unit, such as 64GB"):
        memory_bytes(text)


@given(st.integers(1, 10**6), st.sampled_from(["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_units_are_powers_of_1000_or_1024(count: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    assert memory_bytes(f"{count}{unit}") == count * base ** ("KMGT".index(unit[0]) + 1)
