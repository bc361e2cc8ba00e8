import os
import shutil
import subprocess
from pathlib import Path

import pytest

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords
from drivetrain_launcher.cli.completion.shell_scripts import SHELLS, shell_script


@pytest.mark.parametrize("shell", SHELLS)
def test_a_third_partys_words_reach_no_shell_as_commands(shell: str, tmp_path: Path) -> None:
    hostile = CommandWords(
        name="x",
        about="it's $(touch owned)",
        flags=(
            FlagWords(
                name="--a", about="'; touch owned; '", choices=("$(touch owned)", "fine", "`touch owned`")
            ),
        ),
    )
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "complete").write_text(shell_script(shell, (hostile,), ()))
    prepare = {"zsh": "autoload -Uz compinit; compinit -D; ", "fish": "", "bash": "compopt() { :; }; "}
    use = {
        "bash": "COMP_WORDS=(drivetrain x --a ''); COMP_CWORD=3; _drivetrain; echo ${COMPREPLY[@]}",
        "zsh": "_drivetrain_value x --a; echo $values",
        "fish": "complete -C 'drivetrain x --a '",
    }
    done = subprocess.run(
        [shell, "-c", f"{prepare[shell]}source ./complete; {use[shell]}"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "fine" in done.stdout.split(), done.stderr
    assert not (tmp_path / "owned").exists()
