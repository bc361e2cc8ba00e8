"""Draw the packages, and the folders of each: what is above imports what is below it, as the sources say.

    uv run python tools/draw_packages.py

It writes docs/images/packages/NAME.svg for each package that has folders, and all.svg for the packages themselves; a
test holds the files against what this draws.
"""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from checks.workspace import read_packages
from import_levels import Part, levels_of, parts_of

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images" / "packages"
_WIDTH, _MARGIN, _GAP = 1000, 12, 10
_LINE, _CHARACTER = 15, 6.3  # height of a line of text, width of a character, in pixels
_LEAST_WIDTH = 130
_FOLDER, _FILE = "#9ecae9", "#e8e8e8"


def pictures() -> Iterator[tuple[Path, str]]:
    """Give the file and the drawing of the workspace, and of each package that has folders."""
    packages = read_packages(ROOT)
    names = {package.distribution for package in packages.values()}
    every = {
        package.distribution: Part(
            name=package.distribution,
            files=(package.description,),
            imports=frozenset(names.intersection(package.dependencies) - {package.distribution}),
        )
        for package in packages.values()
    }
    yield PICTURES / "all.svg", draw(every, folders=False)
    for name, package in packages.items():
        parts = parts_of(ROOT / "packages" / name / "src" / package.module)
        if any(part.files for part in parts.values()):
            yield PICTURES / f"{name}.svg", draw(parts)


def draw(parts: dict[str, Part], *, folders: bool = True) -> str:
    """Draw parts, level below level, as SVG.

    Args:
        parts: The parts by name.
        folders: Whether those with files are folders, whose names end in a slash.
    """
    drawn: list[str] = []
    top = float(_MARGIN)
    for level in levels_of(parts):
        for row in _rows([parts[name] for name in level]):
            height = max(_height(part, width) for part, width in row)
            left = float(_MARGIN)
            for part, width in row:
                drawn += _box(part, left, top, width, height, slash="/" if folders and part.files else "")
                left += width + _GAP
            top += height + _GAP
        top += _GAP
    height = top + _MARGIN - 2 * _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
            f'height="{height:g}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height:g}" fill="white"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def _rows(parts: list[Part]) -> Iterator[list[tuple[Part, float]]]:
    """Divide a level into rows that are as wide as the picture; give each part its width."""
    room = _WIDTH - 2 * _MARGIN
    most = max(1, (room + _GAP) // (_LEAST_WIDTH + _GAP))
    for start in range(0, len(parts), most):
        row = parts[start : start + most]
        shares = [1 + len(part.files) / 4 for part in row]
        free = room - _GAP * (len(row) - 1)
        yield [(part, free * share / sum(shares)) for part, share in zip(row, shares, strict=True)]


def _height(part: Part, width: float) -> float:
    return 24 + _LINE * len(_lines(part, width)) + (4 if part.files else 0)


def _lines(part: Part, width: float) -> list[str]:
    """Return the names of a part's files in lines that fit a width."""
    return wrap(", ".join(part.files), int((width - 16) / _CHARACTER), break_on_hyphens=False)


def _box(part: Part, left: float, top: float, width: float, height: float, *, slash: str) -> Iterator[str]:
    colour = _FOLDER if part.files else _FILE
    yield (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}">'
        f"<title>{part.name} imports {', '.join(sorted(part.imports)) or 'none of these'}</title></rect>"
    )
    weight = ' font-weight="bold"' if part.files else ""
    yield f'<text x="{left + 8:g}" y="{top + 16:g}"{weight}>{part.name}{slash}</text>'
    for number, line in enumerate(_lines(part, width)):
        yield f'<text x="{left + 8:g}" y="{top + 34 + _LINE * number:g}" font-size="11">{line}</text>'


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, picture in pictures():
        file.write_text(picture, encoding="utf-8")
