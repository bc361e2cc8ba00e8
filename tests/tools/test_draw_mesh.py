import draw_mesh


def test_the_picture_is_that_of_the_plan() -> None:
    assert draw_mesh.PICTURE.read_text(encoding="utf-8") == draw_mesh.draw(), (
        "docs/images/mesh.svg is out of date: run tools/draw_mesh.py"
    )


def test_every_rank_is_in_one_part_of_each_view() -> None:
    for view in draw_mesh.MEANINGS:
        assert sorted(rank for part in draw_mesh.PLAN.parts(view) for rank in part) == list(range(16))
