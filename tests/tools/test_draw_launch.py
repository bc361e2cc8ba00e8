import draw_launch


def test_the_picture_of_the_help_is_of_the_flags_that_there_are() -> None:
    picture = draw_launch.PICTURES / "help.svg"
    assert picture.read_text(encoding="utf-8") == draw_launch.draw(*draw_launch.DRAWN["help"]), (
        "docs/images/help.svg is out of date: run tools/draw_launch.py help"
    )
