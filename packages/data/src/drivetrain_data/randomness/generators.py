"""Random draws that depend only on a key and leave the global generators unchanged; seeding users' generators."""

import base64
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from drivetrain_data.randomness.permutation import hash_key

T = TypeVar("T")


def is_generator(obj: object) -> bool:
    """Return whether an object is a random generator of a kind that users may pass."""
    # NumPy imports np.random, 5 ms, when it is first asked for.
    return isinstance(obj, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


class _States(NamedTuple):
    torch: torch.Tensor
    numpy: Any  # the bit generator itself: swapping it takes 1 us, copying its state 30 us
    python: Any


class KeyedDraws:
    """A keyed state of the global CPU generators of torch, NumPy and Python, in effect inside a block.

    The next block continues where the last block stopped. Outside blocks, the global generators are unchanged. The
    key consists of non-negative integers, such as (seed, epoch).
    """

    def __init__(self, *key: int) -> None:
        self._seed = hash_key(*key)
        self._states: _States | None = None

    @contextmanager
    def active(self) -> Generator[None]:
        """Run the block with the keyed generators in place of the global ones."""
        with _generators_kept():
            if self._states is None:
                seed_global_generators(self._seed)
            else:
                _restore(self._states)
            try:
                yield
            finally:
                self._states = _capture()

    def around(self, items: Iterator[T]) -> Iterator[T]:
        """Yield items, each read with the keyed generators in place of the global ones."""
        return _read_within(items, self.active)


class GlobalSeeder:
    """A seeder of the global CPU generators of torch, NumPy and Python for every batch, in a few microseconds."""

    def __init__(self) -> None:
        self._bit_generator: Any = None

    def seed(self, seed: int) -> None:
        """Seed the generators with an integer below 2**64."""
        torch.default_generator.manual_seed(seed)
        # NumPy's global generator becomes one of the seeder's own: seeding a new one takes much longer.
        self._bit_generator = self._bit_generator or np.random.MT19937(0)
        np.random.set_bit_generator(self._bit_generator)  # pyright: ignore[reportAttributeAccessIssue]
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)


def preserve_generators(items: Iterator[T]) -> Iterator[T]:
    """Yield items, and restore the global generators after each read."""
    return _read_within(items, _generators_kept)


@contextmanager
def _generators_kept() -> Generator[None]:
    outside = _capture()
    try:
        yield
    finally:
        _restore(outside)


def _read_within(items: Iterator[T], block: Callable[[], AbstractContextManager[None]]) -> Iterator[T]:
    end = object()
    while True:
        with block():
            item = next(items, end)
        if item is end:
            return
        yield item  # pyright: ignore[reportReturnType]


def seed_global_generators(seed: int) -> None:
    """Seed the global CPU generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.set_bit_generator(np.random.MT19937(seed))  # pyright: ignore[reportAttributeAccessIssue] numpy types it not
    random.seed(seed)


def plain_states() -> dict[str, Any]:
    """Return the states of the global CPU generators of torch, NumPy and Python as numbers, strings and lists."""
    version, words, gauss = random.getstate()
    return {
        "torch": _as_text(torch.get_rng_state().numpy()),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "python": [version, _as_text(np.array(words, dtype=np.uint32)), gauss],
    }


def load_plain_states(states: Mapping[str, Any]) -> None:
    """Restore the generator states that `plain_states` returned."""
    torch.default_generator.set_state(torch.from_numpy(_as_array(states["torch"], "uint8")))
    np.random.set_bit_generator(getattr(np.random, states["numpy"]["bit_generator"])())  # pyright: ignore[reportAttributeAccessIssue]
    np.random.set_state(_unplain(states["numpy"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_as_array(words, "uint32").tolist()), gauss))


def _capture() -> _States:
    bit_generator: Any = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    return _States(torch.get_rng_state(), bit_generator, random.getstate())


def _restore(states: _States) -> None:
    torch.set_rng_state(states.torch)
    np.random.set_bit_generator(states.numpy)  # pyright: ignore[reportAttributeAccessIssue]
    random.setstate(states.python)


def _plain(state: Any) -> Any:
    """Return a bit generator's state with its arrays encoded as base64 text."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in cast("dict[str, Any]", state).items()}
    if isinstance(state, np.ndarray):
        array = cast("npt.NDArray[Any]", state)
        return {"dtype": str(array.dtype), "base64": _as_text(array)}
    return state


def _unplain(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if "base64" in state:
        return _as_array(state["base64"], state["dtype"])
    return {name: _unplain(value) for name, value in cast("dict[str, Any]", state).items()}


def _as_text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _as_array(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator with an integer below 2**64."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bit_generator: Any = generator.bit_generator
        bit_generator.state = type(bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def draw_seed(generator: Any) -> int:
    """Draw a seed, 0 to 2**63 - 1, from a generator; a freshly seeded torch generator first gives its own seed."""
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
        fresh = torch.Generator(device=generator.device).manual_seed(seed)
        undrawn = torch.equal(fresh.get_state(), generator.get_state())
        number = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        return (seed if undrawn else int(number.item())) % 2**63
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**63))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(2**63 - 1, dtype=np.int64))
    return generator.getrandbits(63)
