import pytest

from lint.linting import ACCELERATOR, TORCH, codes, findings

TRAINS = "model = accelerator.prepare(model)\n"


@pytest.mark.parametrize(
    "line",
    [
        "model.cuda()",
        "x = x.to('cuda')",
        "x = x.to('cuda:0', non_blocking=True)",
        "device = torch.device('cuda:0')",
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "x = torch.zeros(8, device='cuda')",
        "model = AutoModel.from_pretrained('x', device_map={'': 0})",
        "model = AutoModel.from_pretrained('x', device_map={'': 'cuda:0'})",
        "torch.cuda.set_device(0)",
        "x = x.cuda(0)",
    ],
)
def test_a_hard_coded_device_is_found(line: str) -> None:
    assert codes(f"import torch\n{ACCELERATOR}{TRAINS}{line}\n") == ["DT401"]


@pytest.mark.parametrize(
    "line",
    [
        "x = x.to(accelerator.device)",
        "device = torch.device(f'cuda:{local_rank}')",
        "x = x.cuda(local_rank)",
        "torch.cuda.set_device(local_rank)",
        "torch.cuda.empty_cache()",
        "x = x.to('cpu')",
        "x = x.to(torch.bfloat16)",
        "model = AutoModel.from_pretrained('x', device_map={'': accelerator.process_index})",
        "model = AutoModel.from_pretrained('x', device_map='auto')",
        "print('cuda:0')",
    ],
)
def test_a_device_of_the_rank_is_silent(line: str) -> None:
    assert codes(f"import torch\n{ACCELERATOR}{TRAINS}{line}\n") == []


PLAIN = "model = torch.nn.parallel.DistributedDataParallel(model)\nmodel(x).sum().backward()\n"


def test_a_plain_script_may_say_cuda_and_not_its_number() -> None:
    assert codes(f"{TORCH}{PLAIN}x = x.cuda()\n") == []
    (found,) = findings(f"{TORCH}{PLAIN}x = x.to('cuda:0')\n")
    assert (found.code, found.severity) == ("DT401", "error")


def test_parts_on_several_devices_are_a_decision() -> None:
    assert codes(f"{TORCH}{PLAIN}a.to('cuda:0')\nb.to('cuda:1')\n") == []


def test_a_script_for_one_process_may_name_its_device() -> None:
    assert codes("import torch\nmodel.cuda()\nmodel(x).backward()\n") == []
