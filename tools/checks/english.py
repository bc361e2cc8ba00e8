"""Docstrings read as plain technical English, as far as a machine can tell.

The summary of a function begins with a verb ("Return the bytes of a tensor."), that of anything else with a noun and
its article ("The bytes of a tensor."); a description of an argument or attribute has at least three words.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from checks.findings import Finding
from checks.sources import Source, read_sources

_LEAST_WORDS = 3
# Words of closed classes: none of them is a verb, and a summary that begins with one is no sentence about the thing.
_CLAUSES = frozenset(
    {
        "what",
        "whether",
        "how",
        "where",
        "which",
        "who",
        "whom",
        "whose",
        "why",
        "when",
        "of",
        "that",
        "if",
        "as",
    }
)
_PRONOUNS = frozenset({"this", "that", "these", "those", "it", "its", "they", "them", "their", "one", "such"})
# Clauses that stand for the thing itself, as in "What the error says"; "Whether" and "How many" are the field's own.
_VAGUE = frozenset({"what", "where", "which", "who", "whose", "why", "how"})
_ARTICLES = frozenset({"the", "a", "an", "each", "every", "all", "some", "no", "nothing", "any"})
_OTHERS = frozenset(
    {
        "by",
        "for",
        "in",
        "inside",
        "before",
        "behind",
        "beside",
        "within",
        "without",
        "under",
        "over",
        "on",
        "at",
    }
) | frozenset({"to", "from", "so", "and", "but", "only", "also", "called"})
_SECTIONS = frozenset({"Args", "Attributes", "Returns", "Yields"})
_ITEM = re.compile(r"^ {4}(?P<name>\*{0,2}[\w.]+)(?: \([^)]*\))?: (?P<text>.*)$")


def check(root: Path) -> list[Finding]:
    """Look at the docstrings of every package."""
    sources = read_sources(root, "packages/*/src/**/*.py")
    return [finding for source in sources for finding in findings_in(source)]


def findings_in(source: Source) -> list[Finding]:
    """Return what is wrong with the docstrings of a file."""
    found: list[Finding] = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            messages = [*_of_summary(node, text.split("\n\n")[0]), *_of_items(text)]
            found += [source.finding(node, message) for message in messages]
    return found


def _of_summary(node: ast.AST, summary: str) -> Iterator[str]:
    first = re.split(r"[\s,;:.]", summary.strip(), maxsplit=1)[0].strip("`").lower()
    is_call = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_value(node)
    refused = _CLAUSES | _PRONOUNS | _OTHERS
    if is_call:
        if first in refused | _ARTICLES:
            yield f"the summary begins with {first!r}: begin with a verb, such as 'Return the ...'"
    elif first in refused:
        yield f"the summary begins with {first!r}: begin with an article and a noun, such as 'The ...'"
    if len(summary.split()) < _LEAST_WORDS:
        yield f"the summary {summary!r} has fewer than {_LEAST_WORDS} words: say what it does"


def _is_value(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether decorators make a value of a function: a property, or a rule of the linter."""
    written = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("property" in each or each.startswith("partial(Rule") for each in written)


def _of_items(text: str) -> Iterator[str]:
    """Give what is wrong with the descriptions under "Args:" and its like."""
    for name, description in _items(text):
        words = description.split()
        if len(words) < _LEAST_WORDS:
            yield f"the description of {name} is {description!r}: give at least {_LEAST_WORDS} words"
        elif words[0].strip(",.;:").lower() in _PRONOUNS | _VAGUE:
            yield f"the description of {name} begins with {words[0]!r}: name the thing"


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Give the names and whole descriptions of what a docstring lists."""
    name, description, is_list = "", "", False
    for line in [*text.splitlines(), "End:"]:
        if not line.startswith(" ") and line:
            if name:
                yield name, description
            name, description, is_list = "", "", line.rstrip(":") in _SECTIONS and line.endswith(":")
        elif is_list and (item := _ITEM.match(line)):
            if name:
                yield name, description
            name, description = item["name"], item["text"]
        elif name:
            description += f" {line.strip()}"
