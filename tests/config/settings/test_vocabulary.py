from dataclasses import dataclass, field

import pytest

from drivetrain_config import ConfigError, Source
from drivetrain_config.settings.vocabulary import Vocabulary, check_field, converted, is_secret
from drivetrain_config.source import Entry

IN_FILE = Source("file", "run.yaml:3")


@dataclass(frozen=True)
class Login:
    user: str = ""
    password: str = field(default="", metadata={"secret": True})


@dataclass(frozen=True)
class Tracking:
    login: Login | None = None
    name: str = ""


def test_an_unknown_section_is_told_with_the_nearest_and_all_there_are() -> None:
    own = {"trackings": Tracking}
    with pytest.raises(
        ConfigError, match=r"run\.yaml:3: there is no section 'trakings'; did you mean trackings"
    ):
        Vocabulary(own).section("trakings", IN_FILE)
    with pytest.raises(ConfigError, match=r"sections here: .*trackings"):
        Vocabulary(own).section("q", IN_FILE)


def test_a_section_given_in_code_is_known() -> None:
    vocabulary = Vocabulary({"own_tracking": Tracking})
    assert vocabulary.section("own_tracking", IN_FILE) is Tracking
    assert "own_tracking" in vocabulary.names()


def test_an_unknown_field_is_told_with_the_nearest_and_all_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^run\.yaml:3: section 'tracking' has no field 'nane'; did you mean name; its fields: login, n",
    ):
        check_field("tracking", "nane", ["login", "name"], IN_FILE)


def test_a_value_of_the_wrong_type_is_told_with_field_value_allowed_and_source() -> None:
    with pytest.raises(ConfigError, match=r"^run\.seed='yes': must be an integer; from run\.yaml:3$"):
        converted("run", "seed", int, Entry("yes", IN_FILE))


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(
        ConfigError, match=r"^run\.key=\*\*\*: must be an integer; from run\.yaml:3$"
    ) as caught:
        converted("run", "key", int, Entry("hush", IN_FILE, secret=True))
    assert caught.value.__cause__ is None


def test_a_field_is_secret_when_something_inside_it_is() -> None:
    assert is_secret(Tracking, "login")
    assert is_secret(Login, "password")
    assert not is_secret(Tracking, "name")
