import pytest

from lint.linting import ACCELERATOR, codes, findings, places

SCRIPT = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(data)
{prepare}
for x in {loader}:
    loss = {model}(x).mean()
    accelerator.backward(loss)
    {optimizer}.step()
    {optimizer}.zero_grad()
"""


def script(
    prepare: str, *, model: str = "model", optimizer: str = "optimizer", loader: str = "loader"
) -> str:
    return ACCELERATOR + SCRIPT.format(prepare=prepare, model=model, optimizer=optimizer, loader=loader)


@pytest.mark.parametrize(
    ("prepare", "names", "found"),
    [
        ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)", {}, []),
        ("model, optimizer = accelerator.prepare(model, optimizer)", {}, [("DT201", 10)]),
        ("model, optimizer = accelerator.prepare(model, "
            "optimizer)", {"loader": "tqdm(enumerate(loader))"}, [("DT201", 10)]),
        ("model, loader = accelerator.prepare(model, loader)", {}, [("DT201", 13)]),
        ("optimizer, loader = accelerator.prepare(optimizer, loader)", {}, [("DT201", 11)]),
        ("ddp, opt, batches = accelerator.prepare(model, "
            "optimizer, loader)", {}, [("DT201", 10), ("DT201", 11), ("DT201", 13)]),
        ("ddp, opt, batches = accelerator.prepare(model, optimizer, loader)",
         {"model": "ddp", "optimizer": "opt", "loader": "batches"}, []),
        ("model, optimizer = accelerator.prepare(model, optimizer)\nloader = accelerator.prepare(loader)", {}, []),
        ("model, optimizer = accelerator.prepare(model, optimizer)\nloader = "
            "accelerator.prepare_data_loader(loader)", {}, []),
        ("model, optimizer = accelerator.prepare(model, optimizer)\nloader = shard(loader)", {}, []),
        ("model, optimizer = accelerator.prepare(model, optimizer)\nuse(loader)", {}, []),
        ("model, optimizer, loader = accelerator.prepare(*[model, optimizer, loader])", {}, []),
        ("parts = [model, optimizer, loader]\nmodel, optimizer, loader = accelerator.prepare(*parts)", {}, []),
        ("ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nmodel = ddp", {}, []),
    ],
)  # fmt: skip
def test_what_did_not_go_through_prepare_is_found_in_the_loop(
    prepare: str, names: dict[str, str], found: list[tuple[str, int]]
) -> None:
    assert places(script(prepare, **names)) == found


def test_an_evaluation_with_metrics_needs_its_loader_prepared_and_one_without_does_not() -> None:
    prepare = (
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\ntests = DataLoader(data)\n"
        "for x in tests:\n    {use}\n"
    )
    assert codes(script(prepare.format(use="accelerator.gather_for_metrics(model(x))"))) == ["DT201"]
    assert codes(script(prepare.format(use="print(model(x))"))) == []


def test_a_renamed_object_is_told_with_its_new_name() -> None:
    (found,) = findings(
        script("ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)"), select=("DT201",)
    )
    assert "put the prepared one into `ddp`" in found.what
    assert found.repair == "Use `ddp`, or assign the prepared object to `model`."


def test_a_dropped_result_is_found_if_the_objects_are_used() -> None:
    assert places(script("accelerator.prepare(model, optimizer, loader)"), select=("DT202",)) == [
        ("DT202", 9)
    ]
    (found,) = findings(script("accelerator.prepare(model, optimizer, loader)"), select=("DT202",))
    assert (
        found.repair == "Assign it: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    )
    assert codes(ACCELERATOR + "accelerator.prepare(torch.nn.Linear(4, 1))\n") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("optimizer, model = accelerator.prepare(model, optimizer)", ["DT203"]),
        ("a, b = accelerator.prepare(model, optimizer, loader)", ["DT203"]),
        ("model, optimizer = accelerator.prepare(model, optimizer)", []),
        ("a, b = accelerator.prepare(model, optimizer)", []),
        ("parts = accelerator.prepare(model, optimizer)", []),
        ("model, *others = accelerator.prepare(model, optimizer, loader)", []),
        ("model, optimizer = accelerator.prepare(*parts)", []),
        ("self.model, self.optimizer = accelerator.prepare(self.optimizer, self.model)", ["DT203"]),
    ],
)
def test_results_in_another_order_are_found(line: str, found: list[str]) -> None:
    assert codes(f"{ACCELERATOR}{line}\n") == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("model.module.save_pretrained('x')", ["DT204"]),
        ("plain = model.module if hasattr(model, 'module') else model", []),
        ("while isinstance(model, DistributedDataParallel):\n    model = model.module", []),
        ("accelerator.unwrap_model(model).save_pretrained('x')", []),
        ("package.module", []),
    ],
)
def test_the_wrapper_s_attribute_is_found(line: str, found: list[str]) -> None:
    assert codes(f"{ACCELERATOR}model = accelerator.prepare(model)\n{line}\n") == found
