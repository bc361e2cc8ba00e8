"""Every benchmark runs and writes its table, with the peers that are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "baseline"),
    [
        ("step_overhead", "raw PyTorch"),
        pytest.param("dtype_policy", "plain, fp32", marks=pytest.mark.slow),
        pytest.param("collectives", "torch, one flat all_gather", marks=pytest.mark.slow),
        pytest.param("loader", "raw DataLoader", marks=pytest.mark.slow),
        pytest.param("startup --only empty script, two", "torchrun", marks=pytest.mark.slow),
        pytest.param("binding", "drivetrain launch --bind auto", marks=pytest.mark.slow),
        pytest.param("watchdog", "without the watchdog", marks=pytest.mark.slow),
        pytest.param("resume", "drivetrain, fresh", marks=pytest.mark.slow),
        pytest.param("drop_in --quick --only=classifier", "raw PyTorch", marks=pytest.mark.slow),
        pytest.param("simulated_rendezvous --most=512", "64 agents", marks=pytest.mark.slow),
        pytest.param("simulated_elastic --most=16", "16 nodes", marks=pytest.mark.slow),
        pytest.param("output", "torchrun", marks=pytest.mark.slow),
        pytest.param("backends --only fsdp, shard_grad", "raw", marks=pytest.mark.slow),
        pytest.param("memory", "taken", marks=pytest.mark.slow),
        pytest.param("parallel", "torch, parallelize_module", marks=pytest.mark.slow),
        pytest.param("precision --only optimizer", "drivetrain, torch AdamW", marks=pytest.mark.slow),
        pytest.param("fp8", "convert_model", marks=pytest.mark.slow),
        pytest.param(
            "chunked_loss --tokens=64 --words=1000", "torch, logits.float()", marks=pytest.mark.slow
        ),
        pytest.param("device_map", "drivetrain", marks=pytest.mark.slow),
        pytest.param("track_view --points=100000", "json.loads of each line", marks=pytest.mark.slow),
        pytest.param("offload --only a module", "in memory", marks=pytest.mark.slow),
        pytest.param(
            "load --gigabytes=0.1 --only=of bfloat16, from the cache",
            "plain read into one buffer",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_benchmark_writes_its_table(name: str, baseline: str, tmp_path: Path) -> None:
    script, *flags = name.split(" ", 2)
    command = [
        sys.executable,
        str(BENCHMARKS / f"{script}.py"),
        "--rounds",
        "1",
        "--results",
        str(tmp_path),
        *flags,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    table = (tmp_path / f"{script}.md").read_text()
    assert f"| {baseline} |" in table
    assert "drivetrain" in table or script in ("watchdog", "memory", "simulated_elastic", "fp8")
