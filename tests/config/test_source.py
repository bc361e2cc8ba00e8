from drivetrain_config import Source
from drivetrain_config.source import Entry


def test_a_source_reads_as_a_person_would_say_it() -> None:
    assert str(Source("command line", "--seed")) == "--seed on the command line"
    assert str(Source("environment", "DRIVETRAIN_RUN__SEED")) == "DRIVETRAIN_RUN__SEED in the environment"
    assert str(Source("file", "run.yaml:3")) == "run.yaml:3"
    assert str(Source("code")) == "code"
    assert str(Source("default")) == "default"


def test_a_secret_stays_one_when_it_is_shown() -> None:
    source = Source("file", "run.yaml:3")
    assert repr(Entry("hush", source, secret=True)) == "Entry(***, 'run.yaml:3')"
    assert repr(Entry("loud", source)) == "Entry('loud', 'run.yaml:3')"
