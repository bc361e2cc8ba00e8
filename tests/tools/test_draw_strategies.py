import draw_strategies


def test_the_picture_in_the_guide_is_what_the_loaders_do() -> None:
    assert draw_strategies.PICTURE.read_text(encoding="utf-8") == draw_strategies.draw(), (
        "docs/images/strategies.svg is out of date: run tools/draw_strategies.py"
    )


def test_every_sample_is_read_once_under_each_strategy() -> None:
    for row in draw_strategies.rows():
        assert len(row.cells) == draw_strategies.NUM_SAMPLES
        steps = [cell.step for cell in row.cells if cell.rank >= 0]
        assert (
            max(steps.count(step) for step in steps) <= draw_strategies.NUM_RANKS * draw_strategies.BATCH_SIZE
        )
