import subprocess
import sys


def test_no_public_name_needs_torch_to_be_imported() -> None:
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "import drivetrain_launcher as package\n"
        "for name in package.__all__: getattr(package, name)\n"
        "print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "fine\n", done.stderr
