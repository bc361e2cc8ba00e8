"""Random numbers inside divided layers: each rank draws its own, whereas all ranks draw the same outside."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor


class RankStream:
    """The random numbers of one rank between a column and a row layer, such as the dropout of its own heads.

    Outside, what ranks compute together must drop the same elements: they share the generator's state. Inside, equal
    numbers would drop the same elements of different heads. So the state is exchanged for one that follows from the
    common state and from the rank: nothing more is to be saved or seeded.

    Args:
        rank: The position of this rank among those that divide the layers.
        device: The device whose generator the layers draw from.
        is_used: Whether the layers between draw at all.
    """

    def __init__(self, rank: int, device: torch.device, *, is_used: bool) -> None:
        self._rank, self._device, self._is_used = rank, device, is_used
        self._outside: Tensor | None = None

    def open(self) -> None:
        """Begin to draw this rank's own numbers, unless that has begun."""
        if not self._is_used or self._outside is not None:
            return
        get_state, _, seed = _functions(self._device)
        torch.rand((), device=self._device)  # the next layers begin elsewhere
        self._outside = get_state()
        key = bytes(self._outside.numpy()) + self._rank.to_bytes(8, "little")
        seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))

    def forget(self) -> None:
        """Leave the generator as it is, which another has put back."""
        self._outside = None

    @contextmanager
    def outside(self) -> Generator[None]:
        """Draw the numbers of all ranks in the block, and this rank's own after it if that had begun."""
        had_begun = self._outside is not None
        self.close()
        try:
            yield
        finally:
            if had_begun:
                self.open()

    def close(self) -> None:
        """Go on with the numbers that all ranks draw."""
        if self._outside is not None:
            _, set_state, _ = _functions(self._device)
            set_state(self._outside)
            self._outside = None


@contextmanager
def kept_generator(device: torch.device) -> Generator[Callable[[], bool]]:
    """Put the generator of a device back after the block; yield whether numbers have been drawn from it."""
    get_state, set_state, _ = _functions(device)
    before = get_state()
    try:
        yield lambda: not torch.equal(get_state(), before)
    finally:
        set_state(before)


def _functions(
    device: torch.device,
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None], Callable[[int], object]]:
    """Return the functions that read, write and seed the default generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
    module = torch.get_device_module(device)
    return module.get_rng_state, module.set_rng_state, module.manual_seed
