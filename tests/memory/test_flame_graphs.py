import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from drivetrain_memory import flame_graph, profile, read_traces, write_flame_graph

CHROMIUM = shutil.which("chromium")
HOSTILE = '<script>document.title="owned"</script>" onmouseover="x'


def traces(name: str) -> dict:
    outer = {"ph": "X", "cat": "python_function", "name": "train", "ts": 0, "dur": 100, "pid": 1, "tid": 1}
    return {0: [outer, {**outer, "cat": "cpu_op", "name": name, "ts": 10, "dur": 50}]}


def test_a_call_is_as_wide_as_its_share_and_stands_under_its_caller() -> None:
    page = flame_graph(traces("aten::mm"))
    assert "left:0.000%;width:100.000%;top:0px" in page
    assert "left:0.000%;width:50.000%;top:19px" in page
    assert 'title="aten::mm: 0.050 ms, 1 calls, 50.0%"' in page


def test_names_are_escaped_and_the_page_asks_for_nothing() -> None:
    page = flame_graph(traces(HOSTILE), title=HOSTILE)
    assert "<script" not in page
    assert '" onmouseover' not in page
    assert not any(word in page for word in ("http", "src=", "href=", "@import", "url("))


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    with profile(tmp_path, with_stack=True):
        torch.ones(64, 64) @ torch.ones(64, 64)
    page = write_flame_graph(read_traces(tmp_path), tmp_path / "flame.html", title=HOSTILE)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "aten::mm" in done.stdout
    assert "<title>&lt;script&gt;" in done.stdout
