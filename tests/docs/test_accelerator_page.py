"""Every public name of the Accelerator stands on its page, with a call, which conftest.py at the root runs."""

import re
from pathlib import Path

import pytest

from drivetrain import Accelerator

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "accelerator.md").read_text()
ATTRIBUTES = {"context", "executable_batch_size"}  # set in constructors
NAMES = sorted({name for name in dir(Accelerator) if not name.startswith("_")} | ATTRIBUTES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_row_and_a_call(name: str) -> None:
    rows = "".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("|"))
    calls = "".join(re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
    assert re.search(rf"`{name}[`(]", rows), f"docs/howto/accelerator.md: a row for {name}"
    assert re.search(rf"\.{name}\b", calls), f"docs/howto/accelerator.md: a call of {name}"
