import pytest

from drivetrain_tracking.platforms.conventions import NameRule, PlatformNames


@pytest.mark.parametrize("name", ["'loss'", "'b' of 'a'", "'"])
def test_a_name_that_begins_with_a_quote_is_told_as_any_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = PlatformNames("x", NameRule(taken="."), told=set())
    found = names.of(name)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"tracker 'x' does not take the name {name!r}, or has it already, and shows it as {found!r} (told once)"
    )


def test_a_name_is_not_taken_for_the_place_of_a_nested_value(caplog: pytest.LogCaptureFixture) -> None:
    names = PlatformNames("x", NameRule(), told=set())
    values = {"a": {"b": 1}, "a/b": 2, "'b' of 'a'": 3}
    first = names.flat(values)
    assert sorted(first.values()) == [1, 2, 3]
    assert first["'b' of 'a'"] == 3
    assert names.flat(values) == first
    (record,) = caplog.records
    assert "does not take the name 'b' of 'a', or has it already" in record.getMessage()
