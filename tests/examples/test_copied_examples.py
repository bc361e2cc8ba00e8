"""Examples of one kind of training each: what they show holds, and a resumed run ends as one without a break."""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from example_launching import EXAMPLES, launch
from optional_modules import skip_without
from processes import Completed

pytestmark = [
    pytest.mark.timeout(300),
    # PEFT 0.18 asks transformers 5 for an older name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LIBRARIES = {
    "lora.py": ("transformers", "peft"),
    "dpo.py": ("transformers",),
    "disk_inference.py": ("transformers",),
    "fp8.py": ("torchao",),
    "fabric_data.py": ("lightning_fabric",),
}
EXPORT = "export/model.safetensors"
IMAGES = ("--epochs", "2", "--images", "320", "--save-every", "7")
GAN = ("--steps", "60", "--save-every", "20")
LORA = ("--sequences", "480", "--width", "32", "--save-every", "20")
DPO = ("--pairs", "480", "--save-every", "20")
FP8 = ("--samples", "2560", "--width", "64", "--save-every", "30")


def need(example: str) -> None:
    """Skip the test where a library of the example is not installed."""
    for name in LIBRARIES.get(example, ()):
        skip_without(name)


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the pattern's group found, one at least."""
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, text
    return found


def break_off(whole: Path, part: Path) -> Path:
    """Make the folder of a run that ended right after its first checkpoint; give that checkpoint's manifest."""
    first = min((whole / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.split("-")[1]))
    return shutil.copytree(first, part / "checkpoints" / first.name) / "manifest.json"


@pytest.mark.parametrize(
    ("example", "args", "export"),
    [
        ("image_classifier.py", IMAGES, EXPORT),
        pytest.param("gan.py", GAN, EXPORT, marks=pytest.mark.slow),
        ("lora.py", LORA, "adapter/adapter_model.safetensors"),
        pytest.param("dpo.py", DPO, EXPORT, marks=pytest.mark.slow),
        pytest.param("fp8.py", FP8, None, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_with_the_weights_of_one_without_a_break(
    call_example: Callable[..., str], tmp_path: Path, example: str, args: tuple[str, ...], export: str | None
) -> None:
    need(example)
    whole, part = tmp_path / "whole", tmp_path / "part"
    shown = call_example(example, *args, "--project-dir", whole)
    manifest = break_off(whole, part)
    saved = manifest.stat().st_mtime_ns
    again = call_example(example, *args, "--project-dir", part, "--resume")
    assert manifest.stat().st_mtime_ns == saved  # a run from the start would have saved this step again
    if export is None:
        assert shown.splitlines()[-4:-2] == again.splitlines()[-4:-2]  # the last loss
    else:
        assert (whole / export).read_bytes() == (part / export).read_bytes()
        assert len(list((part / "checkpoints").glob("step-*"))) == len(
            list((whole / "checkpoints").glob("step-*"))
        )


@pytest.mark.slow
def test_the_image_classifier_resumes_on_two_processes(
    run_example: Callable[..., Completed], tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    shown = run_example("image_classifier.py", *IMAGES, "--project-dir", str(whole), num_processes=2).stdout
    manifest = break_off(whole, part)
    saved = manifest.stat().st_mtime_ns
    args = (*IMAGES, "--project-dir", str(part), "--resume")
    assert run_example("image_classifier.py", *args, num_processes=2).stdout in shown
    assert manifest.stat().st_mtime_ns == saved  # a run from the start would have saved this step again
    assert (whole / EXPORT).read_bytes() == (part / EXPORT).read_bytes()


def test_the_image_classifier_learns_and_its_average_is_exported(
    call_example: Callable[..., str], tmp_path: Path
) -> None:
    shown = call_example(
        "image_classifier.py", "--epochs", "3", "--images", "1000", "--project-dir", tmp_path
    )
    assert numbers(r"accuracy ([\d.]+), of the average", shown)[-1] > 0.8
    assert numbers(r"of the average ([\d.]+)", shown)[-1] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "backend"), [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "deepspeed")]
)
def test_a_gan_learns_the_ring_by_any_backend(
    python: str, tmp_path: Path, num_processes: int, backend: str
) -> None:
    if backend == "deepspeed":
        skip_without("deepspeed")
    shown = launch(
        "gan.py",
        "--steps",
        "400",
        "--project-dir",
        str(tmp_path),
        python=python,
        num_processes=num_processes,
        launcher=("--backend", backend),
    ).stdout
    assert numbers(r"lie ([\d.]+) from the ring", shown)[0] < 0.5


def check_adapter(folder: Path) -> None:
    """PEFT reads the adapter, and with it the base model knows what it was trained on."""
    from peft import PeftModel

    names = runpy.run_path(str(EXAMPLES / "lora.py"))
    tokens = names["made_tokens"](16)
    base = names["base_model"](32).eval()
    with torch.no_grad():
        before = base(input_ids=tokens, labels=tokens).loss
        after = PeftModel.from_pretrained(base, folder).eval()(input_ids=tokens, labels=tokens).loss
    assert before > 4
    assert after < 1.5


def test_the_adapter_of_lora_loads_in_peft(call_example: Callable[..., str], tmp_path: Path) -> None:
    need("lora.py")
    shown = call_example("lora.py", "--sequences", "1600", "--width", "32", "--project-dir", tmp_path)
    losses = numbers(r"loss ([\d.]+)", shown)
    assert losses[-1] < 0.5 * losses[0]
    check_adapter(tmp_path / "adapter")


@pytest.mark.slow
def test_lora_trains_under_fsdp(python: str, tmp_path: Path) -> None:
    need("lora.py")
    args = ("--sequences", "3200", "--width", "32", "--project-dir", str(tmp_path))
    launch("lora.py", *args, python=python, num_processes=2, launcher=("--backend", "fsdp"))
    check_adapter(tmp_path / "adapter")


def test_dpo_prefers_what_was_chosen(call_example: Callable[..., str], tmp_path: Path) -> None:
    need("dpo.py")
    shown = call_example("dpo.py", "--pairs", "800", "--project-dir", tmp_path)
    assert numbers(r"in ([\d.]+) % of unseen pairs", shown)[0] > 90


@pytest.mark.slow
def test_dpo_trains_under_fsdp(python: str, tmp_path: Path) -> None:
    need("dpo.py")
    args = ("--pairs", "1600", "--project-dir", str(tmp_path))
    shown = launch("dpo.py", *args, python=python, num_processes=2, launcher=("--backend", "fsdp")).stdout
    assert numbers(r"in ([\d.]+) % of unseen pairs", shown)[0] > 90


def test_inference_from_the_disk_generates_what_memory_does(
    call_example: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("disk_inference.py")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    shown = call_example("disk_inference.py")
    assert numbers(r"(\d+) parts of the model on disk", shown)[0] > 1
    folder = Path("runs/disk_inference/model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[3, 5, 8, 13]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    expected = f"tokens {' '.join(map(str, tokens[0].tolist()))}"
    assert expected in shown
    assert expected in call_example("disk_inference.py", folder, "--memory", "cpu=1MB")


def test_fp8_shows_what_ran_in_8_bits_and_learns(call_example: Callable[..., str], tmp_path: Path) -> None:
    need("fp8.py")
    shown = call_example("fp8.py", *FP8, "--project-dir", tmp_path)
    losses = numbers(r"loss ([\d.]+)", shown)
    assert losses[-1] < 0.5 * losses[0]
    assert "trained in fp8\nfp8 layers: 3 of 5 linear layers in " in shown
    assert "fp8 products: 9 of 14 matrix products" in shown


def test_fp8_falls_back_only_if_asked(call_example: Callable[..., str], tmp_path: Path) -> None:
    need("fp8.py")
    if torch.cuda.is_available():
        pytest.skip("a GPU may run the recipe that the CPU lacks")
    from drivetrain import PrecisionError

    args = (*FP8, "--recipe", "torchao_nvfp4", "--project-dir", tmp_path)
    with pytest.raises(PrecisionError, match="fp8_fallback='bf16' trains in bf16 instead"):
        call_example("fp8.py", *args)
    assert "trained in bf16\n" in call_example("fp8.py", *args, "--fallback")


# Runs the program that its arguments name, which gets SIGTERM once it has said that it has trained 100 steps.
PREEMPTED = """
import builtins, os, runpy, signal, sys

def say(*words, say=print, **options):
    say(*words, **options)
    if str(words[0]).startswith("step 100:"):
        os.kill(os.getpid(), signal.SIGTERM)

builtins.print = say
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_preempted_job_goes_on_to_the_same_weights(
    call_example: Callable[..., str], python: str, tmp_path: Path
) -> None:
    steps = ("--steps", "600")
    command = [python, "-c", PREEMPTED, str(EXAMPLES / "preemption.py"), *steps]
    stopped = subprocess.run(
        [*command, "--project-dir", str(tmp_path / "preempted")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stopped.returncode == 75, stopped
    assert "SIGTERM: saved at step" in stopped.stderr
    assert not (tmp_path / "preempted" / "export").exists()

    shown = call_example("preemption.py", *steps, "--project-dir", tmp_path / "preempted")
    assert 100 <= numbers(r"goes on at step (\d+)", shown)[0] < 600
    call_example("preemption.py", *steps, "--project-dir", tmp_path / "whole")
    whole, preempted = (
        (tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "preempted")
    )
    assert whole == preempted


def run_fabric(*args: str) -> str:
    """Run the example as its users do, since Fabric starts its own processes; give what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fabric_data.py"), *args],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fabric_resumes_in_the_middle_of_an_epoch(call_example: Callable[..., str], tmp_path: Path) -> None:
    need("fabric_data.py")
    args = ("--save-every", "100", "--checkpoint", tmp_path / "checkpoint.pt")
    shown = call_example("fabric_data.py", *args)
    assert "1003 samples, mean error 0.08" in shown
    goes_on = "goes on in epoch 1, behind 592 samples\n"
    assert call_example("fabric_data.py", *args, "--resume") == goes_on + shown


@pytest.mark.slow
def test_fabric_trains_on_sharded_data_and_resumes(tmp_path: Path) -> None:
    need("fabric_data.py")
    args = ("--save-every", "25", "--checkpoint", str(tmp_path / "checkpoint.pt"))
    whole = run_fabric("--devices", "2", *args)
    assert "1003 samples, mean error 0.08" in whole
    goes_on = "goes on in epoch 2, behind 352 samples\n"  # of the three epochs
    assert run_fabric("--devices", "2", *args, "--resume") == goes_on + whole
    assert "1003 samples, mean error 0.08" in run_fabric("--devices", "1", *args, "--resume")
