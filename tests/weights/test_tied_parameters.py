import pytest
import torch
from torch import nn

from drivetrain_weights import TiedParametersError, find_tied_parameters, find_ties, retie_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.block = nn.Linear(3, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight


TIES = [["embed.weight", "head.weight"]]


def test_ties_are_found_with_and_without_memory() -> None:
    assert find_tied_parameters(Tied()) == TIES
    with torch.device("meta"):
        assert find_tied_parameters(Tied()) == TIES
    assert find_tied_parameters(nn.Linear(2, 2)) == []


def test_a_module_under_two_names_ties_all_it_has() -> None:
    block = nn.Linear(2, 2)
    assert find_tied_parameters(nn.Sequential(block, block)) == [
        ["0.weight", "1.weight"],
        ["0.bias", "1.bias"],
    ]


def test_names_of_the_same_memory_are_ties_and_views_that_differ_are_none() -> None:
    base = torch.arange(6.0)
    tensors = {
        "a": base,
        "view": base[:3],
        "again": base.view(6),
        "reshaped": base.view(2, 3),
        "bits": base.view(torch.int32),
        "empty": base[:0],
        "also empty": base[:0],
        "third": base,
        "equal": base.clone(),
        "complex": (number := torch.ones(2, dtype=torch.complex64)),
        "conjugate": number.conj(),
    }
    assert find_ties(tensors) == {"again": "a", "third": "a"}


def test_buffers_of_a_module_are_ties_too_under_their_renamed_names() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False))
    model[1].running_mean = model[0].running_mean
    assert find_ties(model) == {"1.running_mean": "0.running_mean"}
    assert find_ties(model, rename=str.upper) == {"1.RUNNING_MEAN": "0.RUNNING_MEAN"}
    assert find_ties(Tied()) == {"head.weight": "embed.weight"}


def test_a_load_that_parts_them_is_repaired() -> None:
    with torch.device("meta"):
        model = Tied()
    ties = find_tied_parameters(model)
    weights = {name: value for name, value in Tied().state_dict().items() if name != "head.weight"}
    model.load_state_dict(weights, assign=True, strict=False)
    assert model.head.weight.is_meta
    retie_parameters(model, ties)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, weights["embed.weight"])


def test_the_one_with_data_is_taken_whatever_its_place() -> None:
    with torch.device("meta"):
        model = Tied()
    model.head.weight = nn.Parameter(torch.ones(6, 3))
    retie_parameters(model, TIES)
    assert torch.equal(model.embed.weight, torch.ones(6, 3))


def test_equal_copies_become_one() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    retie_parameters(model, TIES)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    "other",
    [torch.zeros(6, 3), torch.ones(5, 3), torch.ones(6, 3, dtype=torch.bfloat16)],
    ids=["values", "shape", "dtype"],
)
def test_copies_that_differ_are_refused_and_nothing_changes(other: torch.Tensor) -> None:
    model = Tied()
    model.embed.weight = nn.Parameter(torch.ones(6, 3))
    model.head.weight = kept = nn.Parameter(other)
    with pytest.raises(TiedParametersError, match=r"'embed.weight' and 'head.weight' .*one would be lost"):
        retie_parameters(model, TIES)
    assert model.head.weight is kept


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(TiedParametersError, match=r"the model has no parameter 'lm_head\.weight'"):
        retie_parameters(Tied(), [["embed.weight", "lm_head.weight"]])
    with pytest.raises(TiedParametersError, match="at least one"):
        retie_parameters(Tied(), [[]])
