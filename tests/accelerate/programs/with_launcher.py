"""A program that launches a function on processes, which use Accelerate."""

import json
import tempfile
from pathlib import Path

from accelerate.launchers import test_launch as connect

from accelerate import Accelerator, debug_launcher


def written(folder: str, what: str) -> None:
    connect()
    accelerator = Accelerator(cpu=True)
    told = [what, accelerator.num_processes, type(accelerator).__module__, KeyError.__name__]
    Path(folder, str(accelerator.process_index)).write_text(json.dumps(told))
    accelerator.end_training()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        debug_launcher(written, (folder, "words"))
        print(
            "FOUND", json.dumps({path.name: json.loads(path.read_text()) for path in Path(folder).iterdir()})
        )


if __name__ == "__main__":
    main()
