import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.run.notebook.rank_main import to_environment, user_modules

environments = st.dictionaries(st.sampled_from("ABCD"), st.text("xy", max_size=2))


@given(environments, environments)
def test_the_changes_turn_one_environment_into_the_other(current: dict, wanted: dict) -> None:
    changes = to_environment(current, wanted)
    result = {**current, **changes}
    assert {name: text for name, text in result.items() if text is not None} == wanted
    assert all(current.get(name) != text for name, text in changes.items())


def test_modules_of_the_user_are_those_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "module_of_the_user.py"
    module.write_text("")
    os.utime(module, ns=(5, 5))
    monkeypatch.syspath_prepend(tmp_path)
    __import__("module_of_the_user")
    try:
        found = user_modules(since_ns=6)
        assert found[str(module)] == 5
        assert user_modules(since_ns=5)[str(module)] == 0  # it may have changed after the import
    finally:
        del sys.modules["module_of_the_user"]
    assert not any("site-packages" in file for file in found)
    assert os.__file__ not in found
