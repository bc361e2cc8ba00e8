import torch

from drivetrain_memory.compat import coo_parts


def test_a_sparse_tensor_with_repeated_entries_gives_its_parts_uncopied() -> None:
    indices, values = torch.tensor([[0, 0, 2]]), torch.ones(3, 4)
    tensor = torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True)
    assert not tensor.is_coalesced()
    found_indices, found_values = coo_parts(tensor)
    assert found_indices.tolist() == indices.tolist()
    assert found_values.data_ptr() == coo_parts(tensor)[1].data_ptr()
    assert found_values.shape == (3, 4)
