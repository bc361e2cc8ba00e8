import pytest

from checks.english import findings_in
from checks.sources import parse


def messages(text: str) -> list[str]:
    return [finding.message for finding in findings_in(parse("packages/x/src/x/y.py", text))]


@pytest.mark.parametrize(
    "summary",
    [
        "Whether it fits.",
        "The bytes of a tensor.",
        "What a load does.",
        "It is done here.",
        "By itself, at once.",
    ],
)
def test_the_summary_of_a_function_begins_with_a_verb(summary: str) -> None:
    (message,) = messages(f'def size():\n    """{summary}"""\n')
    assert "begin with a verb" in message


@pytest.mark.parametrize("summary", ["What is lost.", "Those of a rank.", "Whose turn it is."])
def test_the_summary_of_a_class_or_property_begins_with_a_noun(summary: str) -> None:
    (message,) = messages(f'class Size:\n    """{summary}"""\n')
    assert "an article and a noun" in message
    (message,) = messages(
        f'class Size:\n    """A size in bytes."""\n\n    @property\n    def it(self):\n        """{summary}"""\n'
    )
    assert "an article and a noun" in message


def test_plain_english_passes() -> None:
    text = '''"""Read weight files."""


class Reader:
    """A reader of weight files.

    Attributes:
        size_bytes: The bytes of the file, without its
            header.
    """

    @property
    def name(self) -> str:
        """The name of the file."""

    def read(self, name: str) -> int:
        """Read a tensor.

        Args:
            name: The name of the tensor in the file.

        Returns:
            The bytes that were read.
        """
'''
    assert messages(text) == []


@pytest.mark.parametrize(
    ("description", "told"),
    [
        ("The file.", "at least 3 words"),
        ("Those of the file.", "name the thing"),
        ("It.", "at least 3 words"),
        ("What is in the file.", "name the thing"),
    ],
)
def test_descriptions_say_something(description: str, told: str) -> None:
    items = f"        name: {description}\n        more: A number of\n            bytes.\n"
    text = f'def read(name):\n    """Read a tensor.\n\n    Args:\n{items}    """\n'
    (message,) = messages(text)
    assert "name" in message
    assert told in message


def test_a_short_summary_is_told() -> None:
    assert "fewer than 3 words" in messages('def close():\n    """Close it."""\n')[0]
