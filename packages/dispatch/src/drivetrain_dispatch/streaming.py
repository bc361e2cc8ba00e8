"""Weights that come while others compute: each unit of a model is brought before its turn and leaves after it."""

import threading
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_dispatch.away import call_back, forget, send_away
from drivetrain_dispatch.carrier import Arrival, Carrier, Parcel
from drivetrain_dispatch.order import Cursor, Order
from drivetrain_dispatch.weight_files import MappedFile


class Seat:
    """A tensor that comes and goes. Several units may use it.

    Args:
        tensor: The parameter or buffer, as the model holds it.
        parcel: Its values and where they are computed.

    Attributes:
        arrival: Its values on the device or on their way there; None while nobody claims them.
        at: Their place in the arrival.
        claims: How many units are using it or expect to.
        users: How many are using it.
        version: The tensor's, when its values came.
    """

    __slots__ = ("arrival", "at", "claims", "parcel", "tensor", "users", "version")

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self.tensor = tensor
        self.parcel = parcel
        self.arrival: Arrival | None = None
        self.at = self.claims = self.users = self.version = 0


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """What a model's forwards have brought.

    Attributes:
        num_used: How often a unit was used.
        num_missed: How often it was not on its way when its turn came: the forward stood still.
        bytes_brought: In all.
    """

    num_used: int = 0
    num_missed: int = 0
    bytes_brought: int = 0


class Streaming:
    """The seats of a model's units, and which of them are taken.

    Threads may share a model: a weight stays while one of them uses it. A lock is held while a unit is waited for.
    Between forwards nothing is kept or on its way, since what is stored may be changed then.

    Args:
        units: The seats of each unit, in the order in which they are expected.
        depth: How many units may be on their way beside those in use.
        files: That some of them are the pages of.
    """

    def __init__(
        self, units: Sequence[Sequence[Seat]], *, depth: int, files: Collection[MappedFile] = ()
    ) -> None:
        self.stats = OffloadStats()
        self._units = units
        self._files = files
        self._seats = {id(seat.tensor): seat for unit in units for seat in unit}
        self._order = Order(range(len(units)), depth)
        self._carrier = Carrier()
        self._lock = threading.RLock()
        self._own = _Own(self._order)
        self._forwards: list[Cursor] = []  # of the threads that are in one
        self._expected: set[int] = set()  # units that a thread will use next
        for seat in self._seats.values():
            seat.tensor.data = seat.parcel.home
            send_away(seat.tensor, self)

    def begin(self) -> None:
        """A forward of the whole model begins.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        for file in self._files:
            file.check_unchanged()
        cursor = self._own.cursor
        cursor.begin()
        with self._lock:
            self._forwards.append(cursor)
        try:
            with self._lock:
                self._look_ahead()
        except BaseException:
            self.end(whole=False)
            raise

    def end(self, *, whole: bool) -> None:
        """It is over; `whole` if nothing failed."""
        cursor = self._own.cursor
        cursor.end(whole=whole)
        with self._lock:
            self._forwards.remove(cursor)
            self._look_ahead()

    def enter(self, index: int) -> None:
        """A unit is used: bring it, and begin to bring those that follow."""
        own = self._own
        own.cursor.use(index)
        with self._lock:
            self._take(self._units[index])
        own.num_inside += 1

    def leave(self, index: int) -> None:
        """It is used no more: it goes, unless it is expected again."""
        self._own.num_inside -= 1
        with self._lock:
            self._release(self._units[index])

    def inside(self) -> bool:
        """Whether this thread computes with the model."""
        return self._own.num_inside > 0 or self._own.cursor.inside

    @contextmanager
    def fetched(self, tensors: list[Tensor]) -> Generator[None]:
        """Within it single tensors are there, which no unit in use has brought."""
        seats = [self._seats[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]
        with self._lock:
            self._take(seats)
        try:
            yield
        finally:
            with self._lock:
                self._release(seats)

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        with self._lock:
            self._carrier.close()
            for seat in self._seats.values():
                forget(seat.tensor)
                seat.tensor.data = seat.parcel.home
                seat.arrival = None

    def _take(self, seats: Sequence[Seat]) -> None:
        """Put tensors in place; what comes next is asked for before they are waited for."""
        self.stats.num_used += 1
        if self._claim(seats):
            self.stats.num_missed += 1
        try:
            self._look_ahead()
            arrived = [seat.arrival.wait()[seat.at] for seat in seats if seat.arrival is not None]
        except BaseException:
            self._give_up(seats)
            raise
        for seat, tensor in zip(seats, arrived, strict=True):
            seat.users += 1
            if seat.users == 1:
                call_back(seat.tensor)
                seat.tensor.data = tensor
                seat.version = seat.tensor._version  # pyright: ignore[reportPrivateUsage] it has no other name

    def _release(self, seats: Sequence[Seat]) -> None:
        """Nobody needs them for now: what is stored takes their place."""
        for seat in seats:
            seat.users -= 1
            if seat.users == 0:
                tensor, home = seat.tensor, seat.parcel.home
                if tensor._version != seat.version:  # pyright: ignore[reportPrivateUsage]
                    with torch.no_grad():
                        home.copy_(tensor)  # written to while it was here
                tensor.data = home
                send_away(tensor, self)
        self._give_up(seats)

    def _claim(self, seats: Sequence[Seat]) -> bool:
        """Ask for seats; whether any was not there or on its way."""
        away = [seat for seat in seats if seat.arrival is None]
        if away:
            arrival = self._carrier.bring([seat.parcel for seat in away])
            for at, seat in enumerate(away):
                seat.arrival, seat.at = arrival, at
                self.stats.bytes_brought += seat.parcel.home.nbytes
        for seat in seats:
            seat.claims += 1
        return bool(away)

    def _give_up(self, seats: Sequence[Seat]) -> None:
        """Need seats no more; what nobody needs gives its memory back."""
        for seat in seats:
            seat.claims -= 1
            if seat.claims == 0:
                seat.arrival = None

    def _look_ahead(self) -> None:
        """Ask for what the threads will use next, and give up what they will not."""
        expected = self._expected
        wanted = [index for cursor in self._forwards for index in cursor.ahead]
        for index in expected.difference(wanted):
            expected.discard(index)
            self._give_up(self._units[index])
        for index in wanted:
            if index not in expected:
                self._claim(self._units[index])
                expected.add(index)


class _Own(threading.local):
    """What each thread has for itself: how far it is, and how many units it is in."""

    def __init__(self, order: Order) -> None:
        self.cursor = Cursor(order)
        self.num_inside = 0
