"""A rank without a keeper ends with its owner, and so does what it has started."""

import subprocess
import sys

# A launcher without a keeper: its rank has a child in another process group, and is told of the launcher's death.
RANK = """
import os, subprocess, sys, time
from drivetrain_launcher.run.orphan_watch import watch_owner
watch_owner(os.getppid(), role="launcher", parent=os.getppid())
subprocess.Popen(["sleep", "300"], process_group=0)
print("ready", flush=True)
time.sleep(300)
"""
LAUNCHER = f"""
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], start_new_session=True, stdout=subprocess.PIPE)
rank.stdout.readline()
os.write(1, b"%d" % os.getpid())
os._exit(0)
"""


def test_a_rank_whose_launcher_died_without_a_keeper_ends_with_its_children() -> None:
    # The output ends when neither the rank nor its child holds it.
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=60, check=True
    )
    said = f"drivetrain: the launcher (process {done.stdout}) of this rank has died; the rank stops\n"
    assert done.stderr == said
