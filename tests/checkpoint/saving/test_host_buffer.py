import torch

from drivetrain_checkpoint.saving.host_buffer import on_host
from drivetrain_weights.safetensors_layout import bytes_of


def test_strides_views_conjugates_and_gradients_do_not_matter() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = [
        base.t(),
        base[:, 1::2],
        base[:1].expand(5, 4),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        torch.nn.Parameter(base.clone()),
    ]
    for tensor in tensors:
        staged = on_host(tensor)
        written = torch.frombuffer(bytearray(bytes_of(staged)), dtype=tensor.dtype)
        assert torch.equal(written.view(tensor.shape), tensor.detach())
