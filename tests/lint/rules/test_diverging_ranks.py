import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lint.linting import ACCELERATOR, DRIVETRAIN, TORCH, codes, findings, places

SOME_RANKS = {
    "a block": "if accelerator.is_main_process:\n    accelerator.save_state('out')\n",
    "the other branch": "if accelerator.is_main_process:\n    print(1)\nelse:\n    accelerator.wait_for_everyone()\n",
    "a rank compared": "if accelerator.process_index == 0:\n    accelerator.gather(x)\n",
    "a variable": "is_main = accelerator.is_main_process\nif is_main and step % 10 == 0:\n    "
    "accelerator.reduce(x)\n",
    "a conditional expression": "y = accelerator.gather(x) if accelerator.is_main_process else None\n",
    "a short circuit": "accelerator.is_main_process and accelerator.gather(x)\n",
    "an alternative": "accelerator.is_main_process or accelerator.wait_for_everyone()\n",
    "a while": "while accelerator.is_local_main_process:\n    accelerator.broadcast(x)\n",
    "a match": "match accelerator.process_index:\n    case 0:\n        accelerator.gather(x)\n",
    "an assignment expression": "if main := accelerator.is_main_process:\n    accelerator.gather(x)\n",
    "getattr": "if getattr(accelerator, 'is_main_process'):\n    accelerator.gather(x)\n",
    "the environment": "import os\nif int(os.environ.get('RANK', 0)) == 0:\n    accelerator.gather(x)\n",
    "an environment variable": "import os\nif os.environ['LOCAL_RANK'] == '0':\n    accelerator.gather(x)\n",
    "a comprehension": "y = [accelerator.gather(each) for each in x if accelerator.is_main_process]\n",
    "a test of two": "if not distributed or accelerator.is_main_process:\n    accelerator.save_model(model, 'out')\n",
    "a nested block": "if accelerator.is_main_process:\n    with open('x') as f:\n        for _ in "
    "x:\n            accelerator.reduce(x)\n",
    "a try": "try:\n    if accelerator.is_main_process:\n        accelerator.save_state()\nfinally:\n    pass\n",
    "a decorator": "@accelerator.on_main_process\ndef report():\n    return accelerator.gather(x)\n",
    "a decorator with a rank": "from functools import partial\n@partial(accelerator.on_process, process_index=1)\n"
    "def report():\n    accelerator.gather(x)\n",
    "a wrapped function": "def report():\n    accelerator.gather(x)\naccelerator.on_main_process(report)()\n",
    "a function": "def evaluate():\n    return accelerator.gather(x)\nif "
    "accelerator.is_main_process:\n    evaluate()\n",
    "a function's function": "def inner():\n    accelerator.gather(x)\ndef outer():\n    inner()\n"
    "if accelerator.is_main_process:\n    outer()\n",
    "a method": "class T:\n    def save(self):\n        self.accelerator.get_state_dict(self.model)\n"
    "    def train(self):\n        if self.accelerator.is_main_process:\n            self.save()\n",
    "an attribute": "class T:\n    def __init__(self):\n        self.main = accelerator.is_main_process\n"
    "    def train(self):\n        if self.main:\n            accelerator.save_state()\n",
    "a function that tells": "def first():\n    return accelerator.process_index == 0\nif first():\n"
    "    accelerator.save_state()\n",
    "a backward": "if accelerator.is_main_process:\n    accelerator.backward(loss)\n",
    "prepare": "if accelerator.is_main_process:\n    model = accelerator.prepare(model)\n",
    "a reduced log": "if accelerator.is_main_process:\n    accelerator.log({'x': x}, reduce='mean')\n",
    "an optimizer's step": "if accelerator.is_main_process:\n    optimizer.step()\n",
    "branches in another order": "if accelerator.is_main_process:\n    accelerator.gather(x)\n    "
    "accelerator.reduce(x)\nelse:\n"
    "    accelerator.reduce(x)\n    accelerator.gather(x)\n",
}


@pytest.mark.parametrize("shape", SOME_RANKS)
@pytest.mark.parametrize("head", [ACCELERATOR, DRIVETRAIN], ids=["accelerate", "drivetrain"])
def test_a_collective_on_some_ranks_is_found(shape: str, head: str) -> None:
    assert set(codes(head + SOME_RANKS[shape])) == {"DT101"}


PLAIN = {
    "a compared rank": "if dist.get_rank() == 0:\n    dist.barrier()\n",
    "a parameter": "def work(rank, world_size):\n    if rank == 0:\n        dist.all_reduce(x)\n",
    "an argument": "if args.local_rank in (-1, 0):\n    torch.distributed.broadcast(x, 0)\n",
    "not the first": "rank = dist.get_rank()\nif rank != 0:\n    dist.all_gather(xs, x)\n",
    "an imported function": "from torch.distributed import all_reduce, get_rank\nif not "
    "get_rank():\n    all_reduce(x)\n",
    "a checkpoint": "import torch.distributed.checkpoint as dcp\nif dist.get_rank() == 0:\n    "
    "dcp.save(state, checkpoint_id='x')\n",
    "a backward under DDP": "model = torch.nn.parallel.DistributedDataParallel(model)\n"
    "if dist.get_rank() == 0:\n    model(x).sum().backward()\n",
    "drivetrain's functions": "from drivetrain_state import gather\nif context.is_main_process:\n   "
    " gather(context, x)\n",
    "Accelerate's functions": "from accelerate.utils import gather_object\nif "
    "state.is_main_process:\n    gather_object(x)\n",
    "Accelerate's state": "from accelerate import PartialState\nif PartialState().is_main_process:\n"
    "    PartialState().wait_for_everyone()\n",
    "a new group": "if dist.get_rank() < 2:\n    group = dist.new_group([0, 1])\n",
}


@pytest.mark.parametrize("shape", PLAIN)
def test_a_collective_on_some_ranks_of_a_plain_script_is_found(shape: str) -> None:
    assert codes(TORCH + PLAIN[shape]) == ["DT101"]


TOGETHER = {
    "the same in both branches": "if accelerator.is_main_process:\n    y = accelerator.gather(x)\n  "
    "  print(y)\nelse:\n"
    "    accelerator.gather(x)\n",
    "through a function in one": "def all_of(x):\n    return accelerator.gather(x)\nif accelerator.is_main_process:\n"
    "    all_of(x)\nelse:\n    accelerator.gather(x)\n",
    "with an early return": "def f():\n    if not accelerator.is_main_process:\n        "
    "accelerator.gather(x)\n        return\n"
    "    print(accelerator.gather(x))\n",
    "before the test": "y = accelerator.gather(x)\nif accelerator.is_main_process:\n    print(y)\n  "
    "  torch.save(y, 'y')\n",
    "what one rank may call": "if accelerator.is_main_process:\n    accelerator.init_trackers('x')\n"
    "    accelerator.log({'x': 1})\n"
    "    accelerator.unwrap_model(model).save_pretrained('x')\n    accelerator.print(1)\n",
    "a test of whether there are ranks": "if accelerator.num_processes > 1:\n    accelerator.gather(x)\n",
    "a value that ranks agreed on": "flag = accelerator.reduce(accelerator.is_main_process)\nif "
    "flag:\n    accelerator.gather(x)\n",
    "a test of the step": "if step % 10 == 0:\n    accelerator.save_state()\n",
    "the rank's own name for something else": "if rank > 4:\n    print('a matrix')\n",
    "a function that is only defined": "if accelerator.is_main_process:\n    def f():\n        "
    "accelerator.gather(x)\n",
    "a lambda": "if accelerator.is_main_process:\n    f = lambda: accelerator.gather(x)\n",
    "an error": "if accelerator.is_main_process and exists('x'):\n    raise ValueError('x')\naccelerator.gather(x)\n",
    "an exit that fails": "import sys\nif not accelerator.is_main_process:\n    sys.exit(1)\naccelerator.gather(x)\n",
    "a gather of another object": "if accelerator.is_main_process:\n    asyncio.gather(x)\n    "
    "queue.reduce(x)\n    shelf.gather(x)\n",
}


@pytest.mark.parametrize("shape", TOGETHER)
def test_ranks_that_stay_together_are_silent(shape: str) -> None:
    assert codes(ACCELERATOR + TOGETHER[shape]) == []


PLAIN_TOGETHER = {
    "one rank first": "if args.local_rank not in [-1, 0]:\n    dist.barrier()\nload()\nif "
    "args.local_rank == 0:\n    dist.barrier()\n",
    "one rank first, in a context manager": "def first():\n    is_main = dist.get_rank() == 0\n    "
    "try:\n        if not is_main:\n"
    "            dist.barrier()\n        yield\n    finally:\n        if is_main:\n            dist.barrier()\n",
    "a subgroup": "if dist.get_rank() in members:\n    dist.all_reduce(x, group=group)\n    dist.barrier(group)\n",
    "sending": "if dist.get_rank() == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)\n",
    "whether it is distributed": "if args.local_rank != -1:\n    dist.barrier()\nif args.local_rank "
    ">= 0:\n    dist.barrier()\n",
    "the root's own arguments": "if dist.get_rank() == 0:\n    dist.gather(x, gather_list=xs)\n"
    "else:\n    dist.gather(x)\n",
    "a test of several processes in one branch": "if dist.is_initialized() and dist.get_rank() != "
    "0:\n    dist.gather(x)\nelse:\n"
    "    if dist.is_initialized():\n        dist.gather(x, xs)\n    else:\n        xs = [x]\n",
    "a rank that leads": "if dist.get_rank() == 0:\n    def objective(trial):\n        "
    "dist.broadcast_object_list([trial])\n"
    "    study.optimize(objective)\n    dist.broadcast_object_list([None])\nelse:\n    for _ in range(trials):\n"
    "        dist.broadcast_object_list(x)\n",
    "a script without torch.distributed's module": "if rank == 0:\n    model.gather(x)\n",
    "a match with equal cases": "match dist.get_rank():\n    case 0:\n        dist.barrier()\n    "
    "case _:\n        dist.barrier()\n",
}


@pytest.mark.parametrize("shape", PLAIN_TOGETHER)
def test_protocols_of_plain_scripts_are_silent(shape: str) -> None:
    assert codes(TORCH + PLAIN_TOGETHER[shape]) == []


LOOP = "for step, batch in enumerate(loader):\n    {before}\n    if {test}:\n        {leave}\n    {after}\n"


@pytest.mark.parametrize(
    ("before", "after", "leave", "found"),
    [
        ("pass", "accelerator.gather(x)", "continue", True),
        ("accelerator.gather(x)", "pass", "continue", False),  # the round is over
        ("accelerator.gather(x)", "pass", "break", True),  # the next rounds lack it
        ("pass", "pass", "break", False),
        ("pass", "accelerator.gather(x)", "raise ValueError", False),  # fails the run
        ("pass", "accelerator.gather(x)", "sys.exit()", True),
        ("pass", "accelerator.gather(x)", "sys.exit(3)", False),
    ],
)
def test_a_departure_in_a_loop_counts_if_a_collective_is_skipped(
    before: str, after: str, leave: str, found: bool
) -> None:
    source = LOOP.format(
        before=before, after=after, leave=leave, test="accelerator.is_main_process and step > 3"
    )
    assert places(f"import sys\n{ACCELERATOR}{source}") == ([("DT102", 7)] if found else [])


def test_an_early_return_counts_if_a_collective_follows_also_outside_the_loop() -> None:
    source = (
        "def f():\n    for x in loader:\n        if not accelerator.is_main_process:\n"
        "            return\n    {after}\n"
    )
    assert codes(ACCELERATOR + source.format(after="accelerator.wait_for_everyone()")) == ["DT102"]
    assert codes(ACCELERATOR + source.format(after="print(1)")) == []


def test_a_save_that_returns_on_the_other_ranks_is_told_with_the_call_they_skip() -> None:
    source = (
        "def save(path):\n    if not accelerator.is_main_process:\n        return\n"
        "    torch.save(accelerator.get_state_dict(model), path)\n"
    )
    (found,) = findings(ACCELERATOR + source)
    assert found.line == 5
    assert "they skip `accelerator.get_state_dict` at line 6" in found.what


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for i in range(accelerator.process_index, 100, accelerator.num_processes):", True),
        ("for x in data[accelerator.process_index::accelerator.num_processes]:", True),
        ("mine = data[accelerator.process_index::4]\nfor i, x in enumerate(mine):", True),
        ("with accelerator.split_between_processes(data) as mine:\n  for x in mine:", True),
        ("for i in range(len(data[accelerator.process_index::2])):", True),
        ("for x in loader:", False),
        ("for i in range(accelerator.num_processes):", False),
        (
            "with accelerator.split_between_processes(data, apply_padding=True) as mine:\n  for x in mine:",
            False,
        ),
        ("for i in range(len(loader)):", False),
        (
            "with accelerator.join_uneven_inputs([model]):\n  for x in data[accelerator.process_index::2]:",
            False,
        ),
    ],
)
def test_a_loop_over_a_share_is_uneven(loop: str, found: bool) -> None:
    body = "\n" + "    " * (2 if loop.startswith("with") else 1) + "accelerator.gather(x)\n"
    assert codes(ACCELERATOR + loop + body) == (["DT103"] if found else [])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("try:\n    f()\nexcept RuntimeError:\n    accelerator.save_state()\n", True),
        ("try:\n    f()\nexcept Exception:\n    accelerator.save_state()\n    raise\n", False),
        ("try:\n    import apex\nexcept ImportError:\n    accelerator.wait_for_everyone()\n", False),
        ("try:\n    f()\nexcept KeyboardInterrupt:\n    accelerator.save_state()\n", False),
        ("try:\n    f()\nexcept SkippedStepsError:\n    accelerator.save_state()\n", False),  # all ranks raise it
        ("for x in loader:\n    try:\n        loss = model(x)\n    except RuntimeError:\n        "
            "continue\n    accelerator.backward(loss)\n", True),
        ("for x in loader:\n    try:\n        accelerator.backward(model(x))\n    except "
            "torch.OutOfMemoryError:\n        pass\n", True),
        ("try:\n    f()\nfinally:\n    accelerator.end_training()\n", False),
        ("try:\n    f()\nexcept ValueError as error:\n    print(error)\naccelerator.save_state()\n", False),
    ],
)  # fmt: skip
def test_an_exception_of_one_rank_must_not_choose_a_collective(source: str, found: bool) -> None:
    assert codes(ACCELERATOR + source) == (["DT104"] if found else [])


def test_ranks_that_take_turns_must_not_wait_for_each_other() -> None:
    source = "with accelerator.main_process_first():\n    data = load()\n    {inner}\n"
    assert codes(ACCELERATOR + source.format(inner="accelerator.wait_for_everyone()")) == ["DT105"]
    assert codes(ACCELERATOR + source.format(inner="data = data.map(f)")) == []


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("torch.isnan(loss)", True),
        ("not math.isfinite(loss.item())", True),
        ("loss.isnan().any()", True),
        ("bad", True),
        ("torch.isnan(accelerator.reduce(loss))", False),
        ("torch.isnan(mean)", False),
        ("not torch.isfinite(grad_norm)", False),
        ("loss > 100", False),
    ],
)
def test_a_departure_on_a_loss_of_ones_own_is_a_warning(test: str, found: bool) -> None:
    source = (
        "for x in loader:\n    loss = model(x)\n    bad = torch.isnan(loss)\n    mean = accelerator.reduce(loss)\n"
        f"    if {test}:\n        continue\n    accelerator.backward(loss)\n"
    ).replace(
        "    mean = accelerator.reduce(loss)\n",
        "" if found else "    mean = accelerator.reduce(loss.clone())\n",
    )
    assert codes(ACCELERATOR + source) == (["DT106"] if found else [])


def test_one_cause_is_told_once_with_the_number_of_calls() -> None:
    source = (
        "if accelerator.is_main_process:\n    accelerator.gather(x)\n    accelerator.gather(y)\n"
        "    accelerator.reduce(x)\n"
    )
    (found,) = findings(ACCELERATOR + source)
    assert found.what.endswith("(line 3) lets in; and 2 more calls (lines 5, 6)")
    (found,) = findings(ACCELERATOR + source + "    accelerator.reduce(y)\n" * 5)
    assert found.what.endswith("; and 7 more calls (lines 5, 6, 7, 8, 9 and 2 more)")


CALLS = [
    "accelerator.gather(x)",
    "accelerator.save_state('out')",
    "accelerator.wait_for_everyone()",
    "accelerator.backward(loss)",
    "evaluate()",
]
TESTS = [
    "accelerator.is_main_process",
    "accelerator.process_index == 0",
    "main",
    "not accelerator.is_local_main_process",
    "accelerator.is_main_process and step % 7 == 0",
    "step == 3 and not main",
]
WRAPPERS = ["with open('x') as file:", "for item in items:", "if step > 3:", "try:", "while step < 3:"]


@given(st.lists(st.sampled_from(CALLS), min_size=1, max_size=4), st.data())
def test_a_clean_script_is_silent_until_any_of_its_collectives_is_put_under_a_test_of_the_rank(
    calls: list[str], data: st.DataObject
) -> None:
    wrapped = data.draw(st.integers(0, len(calls) - 1))
    test = data.draw(st.sampled_from(TESTS))
    around = data.draw(st.lists(st.sampled_from(WRAPPERS), max_size=3))
    inside = data.draw(st.lists(st.sampled_from(WRAPPERS), max_size=2))
    depth = data.draw(st.integers(0, 1))
    head = (
        ACCELERATOR
        + "main = accelerator.is_main_process\ndef evaluate():\n    return accelerator.gather(x)\n"
    )

    def script(condition: str | None) -> str:
        bodies = [_within(inside, call) for call in calls]
        if condition is not None:
            bodies[wrapped] = f"if {condition}:\n{textwrap.indent(bodies[wrapped], '    ')}"
        body = _within(around, "step = 0\n" + "".join(bodies))
        return head + (f"def train():\n{textwrap.indent(body, '    ')}" if depth else body)

    assert codes(script(None)) == []
    assert "DT101" in codes(script(test))


def _within(wrappers: list[str], body: str) -> str:
    for wrapper in wrappers:
        body = f"{wrapper}\n{textwrap.indent(body, '    ')}\n"
        body += "finally:\n    pass\n" if wrapper == "try:" else ""
    return body if body.endswith("\n") else f"{body}\n"
