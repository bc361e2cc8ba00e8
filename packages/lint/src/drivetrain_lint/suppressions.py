"""The comments that suppress findings: `# drivetrain: ignore[DT101]`."""

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from drivetrain_lint.reading.documents import Document

_COMMENT = re.compile(r"#\s*drivetrain:\s*(?P<whole>file-)?ignore(?:\[(?P<codes>[^\]]*)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressions:
    """The suppressed codes or names, by line and for the whole file; an empty set stands for all rules."""

    by_line: Mapping[int, frozenset[str]]
    whole_file: frozenset[str] | None

    def cover(self, node: ast.AST, *, code: str, name: str) -> bool:
        """Return whether a comment on a line of the node, or for the whole file, suppresses a finding."""
        if self.whole_file is not None and (not self.whole_file or {code, name} & self.whole_file):
            return True
        first = getattr(node, "lineno", 1)
        last = first if isinstance(node, ast.ExceptHandler) else getattr(node, "end_lineno", first) or first
        for line in range(first, last + 1):
            words = self.by_line.get(line)
            if words is not None and (not words or {code, name} & words):
                return True
        return False


def read_suppressions(document: Document) -> Suppressions:
    """Read the suppressions in the comments of a file."""
    by_line: dict[int, frozenset[str]] = {}
    whole_file: frozenset[str] | None = None
    lines = io.StringIO(document.text if "drivetrain:" in document.text else "").readline
    # Joined cells of a notebook may end in the middle of a line.
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(lines):
            found = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if found is None:
                continue
            words = frozenset(word.strip() for word in (found["codes"] or "").split(",") if word.strip())
            if found["whole"]:
                whole_file = words if whole_file is None else whole_file | words
            else:
                by_line[token.start[0]] = words
    return Suppressions(by_line=by_line, whole_file=whole_file)
