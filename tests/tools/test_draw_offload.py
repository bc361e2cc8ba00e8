import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.slow
def test_a_real_forward_is_drawn(tmp_path: Path) -> None:
    target = tmp_path / "offload.svg"
    subprocess.run([sys.executable, str(TOOLS / "draw_offload.py"), str(target)], check=True, timeout=120)
    for file in (target, TOOLS.parent / "docs" / "images" / "offload.svg"):
        titles = [
            element.text or "" for element in ElementTree.parse(file).iter() if element.tag.endswith("title")
        ]
        assert {title.split(":")[0] for title in titles} == {str(layer) for layer in range(12)}
