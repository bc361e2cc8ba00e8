import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.slow
def test_the_line_below_a_real_loop_is_drawn(tmp_path: Path, python: str) -> None:
    target = tmp_path / "line.svg"
    subprocess.run([python, str(TOOLS / "draw_live_line.py"), str(target)], check=True, timeout=120)
    for file in (target, TOOLS.parent / "docs" / "images" / "live_line.svg"):
        shown = "".join(ElementTree.parse(file).getroot().itertext()).replace("\xa0", " ")
        assert "step 120: loss" in shown
        assert "step 120 | " in shown
        assert "tokens/s | MFU" in shown
        assert "url(http" not in file.read_text()
