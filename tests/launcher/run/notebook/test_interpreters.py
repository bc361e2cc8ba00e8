"""The launcher in plain IPython and in plain Python, typed at their prompts."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

SESSION = """
import os, sys, time, torch.distributed as dist
sys.executable = {python!r}
from drivetrain_launcher import RankFailedError, Workers, debug_launcher
def fail(): raise ValueError("boom from " + os.environ["RANK"])

try: debug_launcher(fail, num_processes=1)
except RankFailedError as error: print(error)

def train(): open("ready" + os.environ["RANK"], "w").close(); time.sleep(1000)

debug_launcher(train)

print("then", debug_launcher(os.getenv, ("RANK",)))
exit()
"""


@pytest.mark.parametrize("shell", ["IPython", "Python"])
@pytest.mark.slow
def test_at_a_prompt_errors_and_interrupts_are_shown_once_and_the_next_call_works(
    shell: str, python: str, tmp_path: Path
) -> None:
    if shell == "IPython":
        pytest.importorskip("IPython")
        (tmp_path / "ipython").mkdir()
        flags = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]
        flags.append(f"--ipython-dir={tmp_path / 'ipython'}")
    else:
        flags = ["-c", "import code; code.interact(banner='')"]  # -i, for a forked process too
    with subprocess.Popen(
        [python, *flags],
        cwd=tmp_path,
        env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a shell starts in the background ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdin is not None
        process.stdin.write(SESSION.format(python=python))
        process.stdin.flush()
        deadline = time.monotonic() + 120
        while (
            len(list(tmp_path.glob("ready*"))) < 2 and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert output.count("ValueError: boom from 0") == 1, output
    assert len(re.findall(r"^KeyboardInterrupt:?\s*$", output, re.MULTILINE)) == 1, output
    assert output.count("interrupted: stopping 2 ranks") == 1, output
    assert "then ['0', '1']" in output
    if shell == "IPython":
        assert 'def fail(): raise ValueError("boom from " + os.environ["RANK"])' in output
