"""The advice of a field, from its metadata."""

import pytest

from drivetrain_config import ConfigError
from drivetrain_config.settings.advice import advice_of


def test_a_function_gives_its_advice_from_what_is_known() -> None:
    advice = advice_of(lambda known: {"value": known["cats"], "why": "they live here"}, {"cats": 3})
    assert advice == {"value": 3, "why": "they live here"}
    assert advice_of(None, {}) is None
    assert advice_of(lambda _: None, {}) is None


def test_a_word_that_no_advice_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no 'recommend'; it may have value, why"):
        advice_of(lambda _: {"recommend": 3}, {})


def test_a_place_without_a_function_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"say package\.module:function"):
        advice_of("nowhere_at_all:ask", {})
