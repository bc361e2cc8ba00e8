"""The live line: on a terminal, and in a file; prints and logging stay whole."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_throughput import LiveLine, Throughput
from drivetrain_throughput.live_line import live_text

MEASURED = Throughput(
    num_steps=2,
    seconds=1.0,
    steps_per_second=2.0,
    samples_per_second=12_345.0,
    tokens_per_second=4_560_000.0,
    mfu=0.412,
    phase_seconds={"data": 0.1, "forward": 0.39, "communication": 0.0, "other": 0.01},
)


def test_the_text_has_rates_and_shares() -> None:
    assert live_text(12, MEASURED) == (
        "step 12 | 2.00 steps/s | 12.3k samples/s | 4.56M tokens/s | MFU 41.2 % | data 20 %, forward 78 %, other 2 %"
    )
    assert live_text(1, Throughput()) == "step 1"


def test_without_a_terminal_lines_come_at_an_interval() -> None:
    stream, now = io.StringIO(), [0.0]
    line = LiveLine(stream, interval_seconds=10, clock=lambda: now[0])
    for step, seconds in enumerate([0.0, 3.0, 9.9, 10.0, 12.0, 25.0]):
        now[0] = seconds
        line.show(step, Throughput())
    line.close()
    assert stream.getvalue() == "step 0\nstep 3\nstep 5\n"


def test_lines_go_to_the_standard_error_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    LiveLine().show(1, Throughput())
    assert capsys.readouterr().err == "step 1\n"


ON_A_TERMINAL = """
import logging, sys, time
from drivetrain_throughput import LiveLine, Throughput
logging.basicConfig(format="LOG %(message)s")
handler, out, err = logging.root.handlers[0], sys.stdout, sys.stderr
line = LiveLine(clock=iter(range(100)).__next__)
for step in range(3):
    line.show(step, Throughput(steps_per_second=2.0, num_steps=1))
    print("printed", step)
    logging.warning("logged %d", step)
line.close()
line.close()
assert (sys.stdout, sys.stderr, handler.stream) == (out, err, err)
print("after")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="wants a pseudo-terminal")
def test_on_a_terminal_prints_and_logging_stand_in_lines_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    import pty

    main, side = pty.openpty()
    script = tmp_path / "script.py"
    script.write_text(ON_A_TERMINAL)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=side, stderr=side, stdin=side, env=environment
    )
    os.close(side)
    written = b""
    while True:
        try:
            block = os.read(main, 4096)
        except OSError:  # Linux says so where the other side is closed
            break
        if not block:
            break
        written += block
    os.close(main)
    assert process.wait() == 0, written.decode()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode()).replace("\r", "\n")
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    for step in range(3):
        assert f"printed {step}" in lines
        assert f"LOG logged {step}" in lines
        assert f"step {step} | 2.00 steps/s" in lines
    assert lines[-1] == "after"
