"""Draw in which formats each recipe computes a linear layer's three products, and write the table of recipes.

    uv run python tools/draw_fp8.py

It writes docs/images/fp8_products.svg and the table in docs/howto/fp8.md, both from what the recipes say of
themselves; a test holds the files against it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from drivetrain_precision import Fp8Recipe, load_recipe, recipe_names

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "images" / "fp8_products.svg"
PAGE = DOCS / "howto" / "fp8.md"
BEGIN, END = "<!-- the recipes, by tools/draw_fp8.py -->\n", "<!-- the end of the recipes -->\n"

_PRODUCTS = (
    ("forward", "output = input x weight"),
    ("input_gradient", "gradient of the input = gradient of the output x weight"),
    ("weight_gradient", "gradient of the weight = gradient of the output x input"),
)
# The background of a cell, by the fewest bits of its formats.
_COLOURS = {"4": "#b2df8a", "8": "#a6cee3", "16": "#e6e6e6"}
_LEFT, _CELL, _ROW, _TOP = 240, 250, 34, 62


def recipes() -> list[Fp8Recipe]:
    """All recipes, in the order of their names."""
    return [load_recipe(name) for name in recipe_names()]


def draw() -> str:
    """The picture, as SVG."""
    rows = recipes()
    width, height = _LEFT + len(_PRODUCTS) * _CELL + 12, _TOP + len(rows) * _ROW + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *_headings(),
            *(part for place, recipe in enumerate(rows) for part in _row(recipe, _TOP + place * _ROW)),
            *_legend(_TOP + len(rows) * _ROW + 14),
            "</svg>",
            "",
        ]
    )


def table() -> str:
    """The table of recipes, in Markdown."""
    lines = [
        "| recipe | hardware | library | forward | input gradient | weight gradient | all-gather | attention |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe in recipes():
        needs, products = recipe.requirements, recipe.products
        least = ".".join(map(str, needs.capability))
        cells = (
            f"`{recipe.name}`",
            f"{needs.hardware} ({least})",
            f"{needs.library} {needs.version}, extra `{needs.extra}`",
            products.forward,
            products.input_gradient,
            products.weight_gradient,
            products.all_gather,
            products.attention,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def with_table(page: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _headings() -> Iterator[str]:
    yield _text(10, 46, "recipe", fill="#606060")
    for place, (_, product) in enumerate(_PRODUCTS):
        result, _, factors = product.partition(" = ")
        yield _text(_LEFT + (place + 0.5) * _CELL, 24, result, anchor="middle")
        yield _text(_LEFT + (place + 0.5) * _CELL, 46, f"= {factors}", anchor="middle", fill="#606060")


def _row(recipe: Fp8Recipe, top: int) -> Iterator[str]:
    yield _text(10, top + 19, recipe.name)
    for place, (product, _) in enumerate(_PRODUCTS):
        formats = getattr(recipe.products, product)
        left = _LEFT + place * _CELL
        yield _box(left, top, _CELL - 4, _ROW - 6, _COLOURS[_bits(formats)])
        yield _text(left + _CELL / 2 - 2, top + 19, formats, anchor="middle")


def _legend(top: int) -> Iterator[str]:
    meanings = (("8", "8 bits"), ("4", "4 bits"), ("16", "16 bits"))
    for place, (bits, meaning) in enumerate(meanings):
        left = _LEFT + place * 100
        yield _box(left, top, 14, 14, _COLOURS[bits])
        yield _text(left + 20, top + 12, meaning)
    yield _text(
        _LEFT + 330, top + 12, "sums in fp32; other layers, attention and norms in bf16", fill="#606060"
    )


def _bits(formats: str) -> str:
    """Return the bits of a product's formats, such as "8" of "e4m3 x e4m3"."""
    if "fp4" in formats:
        return "4"
    return "16" if formats.startswith("bf16") else "8"


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}\n{PAGE}\n")
