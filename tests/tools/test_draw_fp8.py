import draw_fp8


def test_the_picture_in_the_guide_is_what_the_recipes_say() -> None:
    assert draw_fp8.PICTURE.read_text(encoding="utf-8") == draw_fp8.draw(), (
        "docs/images/fp8_products.svg is out of date: run tools/draw_fp8.py"
    )


def test_the_table_in_the_guide_is_what_the_recipes_say() -> None:
    page = draw_fp8.PAGE.read_text(encoding="utf-8")
    assert page == draw_fp8.with_table(page), "the table is out of date: run tools/draw_fp8.py"
    assert page.count(draw_fp8.BEGIN) == page.count(draw_fp8.END) == 1


def test_every_recipe_has_a_row() -> None:
    assert len(draw_fp8.table().splitlines()) == 2 + len(draw_fp8.recipes())
