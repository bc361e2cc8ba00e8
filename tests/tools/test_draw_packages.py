from pathlib import Path

import pytest

import draw_packages
from import_levels import Part, levels_of, parts_of


def test_the_pictures_on_the_design_page_are_what_the_sources_import() -> None:
    drawn = dict(draw_packages.pictures())
    assert set(draw_packages.PICTURES.glob("*.svg")) == drawn.keys()
    for file, picture in drawn.items():
        assert file.read_text(encoding="utf-8") == picture, f"{file.name}: run tools/draw_packages.py"


def test_what_imports_stands_above_what_it_imports(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    (package / "stock").mkdir(parents=True)
    (package / "__init__.py").write_text("from shop.till import pay")
    (package / "till.py").write_text("from shop.stock.shelf import take\nimport shop.money")
    (package / "money.py").write_text("import os")
    (package / "stock" / "__init__.py").write_text("")
    (package / "stock" / "shelf.py").write_text("from shop import money")
    parts = parts_of(package)
    assert parts["stock"] == Part(name="stock", files=("shelf",), imports=frozenset({"money"}))
    assert parts["till"].imports == {"stock", "money"}
    assert levels_of(parts) == [["till"], ["stock"], ["money"]]


def test_a_circle_is_an_error() -> None:
    parts = {
        name: Part(name=name, files=(), imports=frozenset({other})) for name, other in ("ab", "bc", "cb")
    }
    with pytest.raises(ValueError, match="in a circle: a, b, c"):
        levels_of(parts)
