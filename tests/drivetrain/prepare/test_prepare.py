import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.parts.prepared import PreparedObjects
from drivetrain.prepare.prepare import sort_objects
from plain_loop.accelerated import accelerator_of


def test_objects_are_sorted_by_kind_in_their_order() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    scheduler = StepLR(optimizer, 1)
    loaders = [DataLoader(TensorDataset(torch.arange(n))) for n in (2, 3)]
    found = sort_objects([loaders[1], scheduler, model, loaders[0], optimizer])
    assert (found.models, found.optimizers, found.schedulers) == ([model], [optimizer], [scheduler])
    assert found.loaders == [loaders[1], loaders[0]]


def test_an_object_that_comes_twice_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="argument 1 \\(Linear\\) comes twice"):
        sort_objects([model, model])


def test_a_model_that_was_not_prepared_is_named() -> None:
    with pytest.raises(ValueError, match="Linear was not prepared by this Accelerator"):
        PreparedObjects(list).of(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="the 0 parameters to clip belong to no prepared model"):
        PreparedObjects(list).holding([])


def test_what_is_no_model_is_named() -> None:
    accelerator = accelerator_of()
    model = nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, SGD(model.parameters()))
    for given in (3, (model, "critic"), 1.5):
        with pytest.raises(TypeError, match="is not a model: pass the model that prepare"):
            accelerator.backward(model(torch.ones(1, 1)).sum(), model=given)
    assert model.weight.grad is None


def test_an_accelerator_knows_a_model_that_was_compiled_after_prepare() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = torch.compile(model, backend="eager")
    before = plain[0].weight.detach().clone()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum(), model=model)
            optimizer.step()
    assert accelerator.unwrap_model(model) is plain
    assert not torch.equal(plain[0].weight, before)


def test_parameters_are_clipped_with_the_model_they_belong_to() -> None:
    accelerator = accelerator_of()
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models = accelerator.prepare(*models, *optimizers)[:2]
    for value, model in enumerate(models, start=3):
        accelerator.backward(model(torch.tensor([[float(value)]])).sum(), model=model)
    norms = [accelerator.clip_grad_norm_(model.parameters(), 1.0) for model in reversed(models)]
    assert norms == [4.0, 3.0]
    accelerator.free_memory()
    with pytest.raises(ValueError, match="the 1 parameters to clip belong to no prepared model"):
        accelerator.clip_grad_norm_(models[1].parameters(), 1.0)


def test_unwrapping_takes_torchs_own_wrappers_off_whoever_put_them_on() -> None:
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(2, 1)
    assert accelerator.unwrap_model(nn.DataParallel(module)) is module
    compiled = torch.compile(nn.DataParallel(module), backend="eager")
    assert accelerator.unwrap_model(compiled) is module
    inside = torch.compile(module, backend="eager")
    assert accelerator.unwrap_model(nn.DataParallel(inside)) is inside
    prepared = accelerator.prepare(nn.DataParallel(module))
    assert accelerator.unwrap_model(prepared) is module
    assert accelerator.unwrap_model(nn.DataParallel(prepared)) is module


@pytest.mark.ranks(2)
def test_unwrapping_takes_a_users_replica_off() -> None:
    with accelerator_of("ddp") as accelerator:
        module, other = nn.Linear(2, 1), nn.Linear(2, 1)
        by_hand = nn.parallel.DistributedDataParallel(other)
        prepared = accelerator.prepare(module)
        assert accelerator.unwrap_model(by_hand) is other
        assert accelerator.unwrap_model(torch.compile(by_hand, backend="eager")) is other
        assert accelerator.unwrap_model(prepared) is module
