"""Expand Slurm's short forms: lists of hosts such as `n[001-003,007]`, and counts such as `2(x3),1`."""

import re
from itertools import product
from math import prod

# A job has fewer nodes than this; a longer list is a mistake, and would fill the memory.
MOST_HOSTS = 1_000_000
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PIECE = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the host names that a Slurm list of hosts stands for, in its order.

    Names are separated by commas. Each bracket of a name holds numbers and ranges, which keep their leading zeros:
    `n[001-003,007],gpu-[1-2]-[5,8]` stands for n001, n002, n003, n007, gpu-1-5, gpu-1-8, gpu-2-5 and gpu-2-8. Later
    brackets of a name count faster. ValueError if a bracket is open, nested or empty, a range is invalid, or the list
    has over a million hosts.
    """
    hosts: list[str] = []
    for word in _split(text):
        # The choices for each part: a plain one has one, a bracket several.
        parts: list[list[str]] = []
        for plain, bracket in _PIECE.findall(word):
            parts += [[plain]] if plain else []
            parts += (
                [[name for each in bracket.split(",") for name in _numbers(each, text)]] if bracket else []
            )
        if len(hosts) + prod(map(len, parts)) > MOST_HOSTS:
            raise ValueError(f"{_short(text)}: stands for more than {MOST_HOSTS} hosts")
        hosts += ["".join(each) for each in product(*parts)]
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a Slurm list of counts: `2(x3),1` stands for 2, 2, 2 and 1."""
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None or not word.isascii():
            raise ValueError(f"{_short(text)}: {word!r} is no count, such as 2 or 2(x3)")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MOST_HOSTS:
            raise ValueError(f"{_short(text)}: stands for more than {MOST_HOSTS} nodes")
        counts += [int(match[1])] * repeats
    return tuple(counts)


def _split(text: str) -> list[str]:
    """Split a list at its commas outside brackets."""
    words, depth, start = list[str](), 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"{_short(text)}: brackets do not match at character {place + 1}")
        if character == "," and depth == 0:
            words.append(text[start:place])
            start = place + 1
    words.append(text[start:])
    if depth:
        raise ValueError(f"{_short(text)}: a bracket is not closed")
    if not all(words):
        raise ValueError(f"{_short(text)}: a host name is empty")
    if "[]" in text:
        raise ValueError(f"{_short(text)}: a bracket is empty")
    return words


def _numbers(word: str, text: str) -> list[str]:
    first, dash, last = word.partition("-")
    if not all(end.isascii() and end.isdecimal() for end in ((first, last) if dash else (first,))):
        raise ValueError(f"{_short(text)}: {word!r} in brackets is no number or range, such as 3 or 001-007")
    if not dash:
        return [first]
    low, high = int(first), int(last)
    if high < low or high - low >= MOST_HOSTS:
        raise ValueError(f"{_short(text)}: {word!r} in brackets must count upwards, to at most {MOST_HOSTS}")
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
