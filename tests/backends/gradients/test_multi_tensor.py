"""Each private kernel of torch is what gradients rely on: these tests tell when a new torch changes one."""

import math

import torch

from drivetrain_backends.gradients.multi_tensor import (
    multiply_by_device,
    norms,
    stored_values,
    unscale_on_host,
)
from drivetrain_backends.gradients.snapshot import is_nonzero, versions_of


def test_tensors_of_several_dtypes_are_multiplied_in_place_by_a_number_or_a_tensor() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.ones(())]
    multiply_by_device(tensors, 3.0)
    multiply_by_device(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[1.5] * 2, [1.5] * 3, 1.5]
    assert tensors[1].dtype == torch.bfloat16
    multiply_by_device([], 3.0)


def test_norms_are_of_each_tensor_and_the_largest_magnitude_keeps_a_nan() -> None:
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([math.nan, 1.0])]
    assert norms(tensors[:1], 2.0)[0].item() == 5.0
    largest = norms(tensors, math.inf)
    assert largest[0].item() == 4.0
    assert largest[1].isnan()


def test_gradients_on_the_host_are_unscaled_and_an_infinity_is_found() -> None:
    gradients = [torch.full((2,), 4.0), torch.full((1,), 8.0)]
    assert unscale_on_host(gradients, torch.tensor(0.25)).item() == 0.0
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 1.0], [2.0]]
    assert unscale_on_host([torch.tensor([math.inf])], torch.tensor(0.25)).item() == 1.0


def test_a_write_to_the_stored_values_of_a_sparse_gradient_is_one_to_the_gradient() -> None:
    gradient = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    gradient = gradient.coalesce()
    stored_values(gradient).mul_(2)
    assert gradient.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    dense = torch.ones(2)
    assert stored_values(dense) is dense


def test_a_write_in_place_raises_the_version_of_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    before = versions_of([parameter])
    assert before.are(versions_of([parameter]))
    parameter.grad.zero_()
    assert not before.are(versions_of([parameter]))
    assert not is_nonzero(parameter.grad)
