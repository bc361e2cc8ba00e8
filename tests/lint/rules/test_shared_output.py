import pytest

from lint.linting import ACCELERATOR, TORCH, codes

TRAIN = "def train(path):\n    for x in loader:\n        accelerator.backward(model(x))\n{lines}"


def train(*lines: str) -> str:
    return f"import torch, os\n{ACCELERATOR}" + TRAIN.format(lines="".join(f"    {line}\n" for line in lines))


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["torch.save(model.state_dict(), 'model.pt')"], True),
        (["torch.save(model.state_dict(), f'model-{epoch}.pt')"], True),
        (["out = os.path.join(folder, 'model.pt')", "torch.save(state, out)"], True),
        (["if accelerator.is_main_process:", "    torch.save(state, 'model.pt')"], False),
        (["if not accelerator.is_main_process:", "    return", "torch.save(state, 'model.pt')"], False),
        (["torch.save(state, f'model-{accelerator.process_index}.pt')"], False),
        (["out = f'part-{rank}.pt'", "torch.save(state, out)"], False),
        (["torch.save(state, buffer)"], False),
        (["torch.save(state, path)"], False),  # the caller may give one to each rank
    ],
)
def test_one_file_of_all_ranks_is_found(lines: list[str], found: bool) -> None:
    assert codes(train(*lines)) == (["DT501"] if found else [])


def test_a_function_of_unknown_callers_may_save() -> None:
    assert codes(f"import torch\n{ACCELERATOR}def save():\n    torch.save(state, 'x.pt')\n") == []


def test_a_question_is_found_unless_one_rank_asks() -> None:
    assert codes(train("answer = input('Go on? ')")) == ["DT503"]
    assert codes(train("if accelerator.is_main_process:", "    input()")) == []


@pytest.mark.parametrize(
    ("sampler", "extra", "found"),
    [
        ("DistributedSampler(data)", "", True),
        ("DistributedSampler(data, shuffle=True)", "", True),
        ("DistributedSampler(data, shuffle=False)", "", False),
        ("DistributedSampler(data)", "sampler.set_epoch(epoch)", False),
        ("RandomSampler(data)", "", False),
    ],
)
def test_a_sampler_whose_order_never_changes_is_found(sampler: str, extra: str, found: bool) -> None:
    source = (
        f"{TORCH}from torch.utils.data import DistributedSampler, RandomSampler\nsampler = {sampler}\n"
        f"for epoch in range(3):\n    {extra or 'pass'}\n    for x in loader:\n        model(x).backward()\n"
    )
    assert codes(source) == (["DT504"] if found else [])


def test_one_epoch_needs_no_new_order() -> None:
    source = (
        f"{TORCH}from torch.utils.data import DistributedSampler\nsampler = DistributedSampler(data)\n"
        "for x in loader:\n    model(x).backward()\n"
    )
    assert codes(source) == []
