import subprocess
import sys

import drivetrain_launcher


def test_the_public_names() -> None:
    assert drivetrain_launcher.__all__ == [
        "Host",
        "LaunchError",
        "LaunchPlan",
        "LaunchSettings",
        "LaunchTarget",
        "RankFailedError",
        "RankPlan",
        "Workers",
        "debug_launcher",
        "detect_host",
        "notebook_launcher",
        "plan_launch",
        "run_plan",
    ]
    assert dir(drivetrain_launcher) == drivetrain_launcher.__all__


def test_every_public_name_resolves() -> None:
    for name in drivetrain_launcher.__all__:
        assert getattr(drivetrain_launcher, name).__name__ == name


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
