import pytest

from lint.linting import ACCELERATOR, TORCH, codes, findings

PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("loss = model(x).mean()\nloss.backward()", True),
        ("out = model(x)\nloss = f(out)\ntotal = loss / 2\ntotal.backward()", True),
        ("scaler.scale(model(x)).backward()", True),
        ("accelerator.backward(model(x))", False),
        ("other = plain(x)\nother.backward()", False),
        ("engine.backward(model(x))", False),
        ("if accelerator is None:\n    model(x).backward()", False),
        ("if fp16:\n    accelerator.backward(model(x))\nelse:\n    model(x).backward()", False),
        ("torch.autograd.backward(model(x))", False),
    ],
)
def test_a_backward_past_the_accelerator_is_found(lines: str, found: bool) -> None:
    assert codes(f"{ACCELERATOR}{PREPARED}{lines}\n", select=("DT301",)) == (["DT301"] if found else [])


def test_its_repair_names_the_loss() -> None:
    (found,) = findings(f"{ACCELERATOR}{PREPARED}scaler.scale(model(x)).backward()\n", select=("DT301",))
    assert found.repair == "Write accelerator.backward(model(x))."


def test_a_plain_script_calls_backward_itself() -> None:
    assert codes(f"{TORCH}loss = model(x)\nloss.backward()\n") == []


WINDOW = "for x in loader:\n    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n"


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("        optimizer.step()\n", False),
        ("    optimizer.step()\n", True),
        ("    if accelerator.sync_gradients:\n        optimizer.step()\n", False),
        ("    if step % 4 == 0:\n        optimizer.step()\n", False),
        ("    plateau.step(1.0)\n", False),
        ("optimizer.step()\n", False),  # after the loop: not the loop's step
    ],
)
def test_a_step_outside_the_window_is_found(step: str, found: bool) -> None:
    scheduler = "import torch\nplateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    assert codes(ACCELERATOR + scheduler + PREPARED + WINDOW + step) == (["DT302"] if found else [])


@pytest.mark.parametrize(("steps", "found"), [("4", True), ("args.steps", True), ("1", False)])
def test_accumulation_that_is_asked_for_and_never_entered_is_found(steps: str, found: bool) -> None:
    head = f"from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps={steps})\n"
    body = "for x in loader:\n    accelerator.backward(model(x))\n    optimizer.step()\n"
    assert codes(head + PREPARED + body) == (["DT302"] if found else [])
    by_hand = body.replace("    optimizer.step()", "    if i % 4 == 0:\n        optimizer.step()")
    assert codes(head + PREPARED + by_hand) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["loss.backward()", "optimizer.zero_grad()", "optimizer.step()"], True),
        (["loss.backward()", "optimizer.step()", "optimizer.zero_grad()"], False),
        (["optimizer.zero_grad()", "loss.backward()", "optimizer.step()"], False),
        (["loss.backward()", "other_optimizer.zero_grad()", "optimizer.step()"], False),
        (["loss.backward()", "optimizer.zero_grad()", "loss.backward()", "optimizer.step()"], False),
        (["with autocast():", "    loss.backward()", "optimizer.zero_grad()", "optimizer.step()"], True),
        (["g_optimizer.zero_grad()", "g.backward()", "g_optimizer.step()", "d_optimizer.zero_grad()", "d.backward()",
          "d_optimizer.step()"], False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", [ACCELERATOR, TORCH], ids=["accelerate", "torch"])
def test_gradients_cleared_before_the_step_are_found(lines: list[str], found: bool, head: str) -> None:
    body = "for x in loader:\n    " + "\n    ".join(lines) + "\n"
    assert codes(head + body) == (["DT303"] if found else [])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", True),
        ("nn.utils.clip_grad_value_(model.parameters(), 1.0)", True),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)", False),
        ("if accelerator.sync_gradients:\n    torch.nn.utils.clip_grad_norm_(x, 1.0)", False),
    ],
)
def test_clipping_past_the_accelerator_is_found(line: str, found: bool) -> None:
    source = (
        f"import torch\nfrom torch import nn\n{ACCELERATOR}{PREPARED}accelerator.backward(model(x))\n{line}\n"
    )
    if "sync_gradients" in line:  # a choice by the accelerator's state is still past it
        found = False
    assert codes(source) == (["DT304"] if found else [])
