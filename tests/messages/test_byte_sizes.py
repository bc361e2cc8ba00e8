import pytest

from drivetrain_messages import format_size, parse_size


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        (0, 0),
        (7, 7),
        ("0GB", 0),
        ("3B", 3),
        ("10kb", 10_000),
        ("24GB", 24 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 512 * 2**20),
        ("2tib", 2 * 2**40),
        (" 10MB ", 10**7),
    ],
)
def test_a_size_is_bytes_or_has_a_unit(size: int | str, size_bytes: int) -> None:
    assert parse_size(size) == size_bytes


@pytest.mark.parametrize("size", [-1, 1.5, True, None, "", "5", "GB", "5 apples", "5XB", "-5GB", "5 G B"])
def test_what_is_no_size_is_refused_with_the_units(size: object) -> None:
    with pytest.raises(ValueError, match=r"is no size: give one with a unit .* \(units: B, KB"):
        parse_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.9, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (-2_500_000, "-2.50 MB"),
        (1000, "1.00 kB"),
        (2_500_000, "2.50 MB"),
        (10**16, "10000.00 TB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(size_bytes: int, shown: str) -> None:
    assert format_size(size_bytes) == shown
