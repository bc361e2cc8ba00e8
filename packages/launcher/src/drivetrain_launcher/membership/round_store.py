"""The store of the agents in one round, whose waits end when the round does."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistStoreError, Store, TCPStore

from drivetrain_launcher.membership.member import Member, RoundOverError

Result = TypeVar("Result")

_LOOK_INTERVAL_SECONDS = 0.1


class RoundStore(Store):
    """The keys of one round in the store of the run, by which torch's agent agrees on ranks and waits at the end."""

    def __init__(self, member: Member, number: int) -> None:
        super().__init__()
        self._member = member
        self._number = number
        self._timeout = timedelta(minutes=5)

    @property
    def timeout(self) -> timedelta:
        """The longest time of a wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time of a wait."""
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set a key."""
        self._call(lambda store: store.set(self._key(key), value))

    def add(self, key: str, amount: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to the number under a key, and return the sum."""
        return self._call(lambda store: store.add(self._key(key), amount))

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait until a key has a value, and return the value."""
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return whether all keys have a value."""
        return self._call(lambda store: store.check([self._key(key) for key in keys]))

    def multi_set(self, keys: list[str], values: list[str]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait until several keys have values, and return the values."""
        self.wait(keys)
        return self._call(lambda store: store.multi_get([self._key(key) for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait until all keys have a value; Round- or RunOverError if that ends first, else DistStoreError."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            self._member.check()
            state = self._member.state
            if state.round > self._number or state.is_over or self._member.was_frozen:
                raise RoundOverError(f"round {self._number} is over: {state.reason}")
            if time.monotonic() > deadline:
                raise DistStoreError(f"{', '.join(keys)}: no value within {limit.total_seconds():g} s")
            time.sleep(_LOOK_INTERVAL_SECONDS)

    def _call(self, function: Callable[[TCPStore], Result]) -> Result:
        return self._member.call(function)

    def _key(self, key: str) -> str:
        return f"drivetrain/round/{self._number}/{key}"
