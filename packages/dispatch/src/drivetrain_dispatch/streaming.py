"""Weights that come while others compute: each unit of a model is brought before its turn and leaves after it."""

import threading
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

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
    """

    __slots__ = ("arrival", "at", "parcel", "tensor", "users", "version")

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self.tensor = tensor
        self.parcel = parcel
        self.users = 0
        self.arrival: Arrival | None = None
        self.at = 0  # its place in the arrival
        self.version = 0


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """What a model's forwards have brought.

    Attributes:
        num_brought: Units.
        num_missed: Of them, those that were not on their way when their turn came: the forward stood still.
        bytes_brought: In all.
    """

    num_brought: int = 0
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
        self._files = files
        self._units = units
        self._depth = depth
        self._seats = {id(seat.tensor): seat for unit in units for seat in unit}
        self._order = Order(range(len(units)))
        self._carrier = Carrier()
        self._lock = threading.RLock()
        self._own = threading.local()  # of each thread, its cursor and the units it is in
        self._cursors: WeakSet[Cursor] = WeakSet()
        self._coming: set[int] = set()  # units that were asked for ahead of their turn
        for seat in self._seats.values():
            seat.tensor.data = seat.parcel.home
            send_away(seat.tensor, self)

    def begin(self) -> None:
        """A forward of the whole model begins.

        Raises:
            WeightFilesError: A file was replaced, written to or deleted.
        """
        cursor = self._cursor()
        outermost = not cursor.inside
        cursor.begin()
        for file in self._files:
            file.check_unchanged()
        if outermost:
            with self._lock:
                self._look_ahead()

    def end(self, *, whole: bool) -> None:
        """It is over; `whole` if nothing failed."""
        self._cursor().end(whole=whole)
        with self._lock:
            self._look_ahead()

    def enter(self, index: int) -> None:
        """A unit is used: bring it, and begin to bring those that follow."""
        cursor = self._cursor()
        with self._lock:
            cursor.use(index)
            self._take(self._units[index], asked=index in self._coming)
            self._coming.discard(index)
            self._entered().append(index)
            self._look_ahead()

    def leave(self, index: int) -> None:
        """It is used no more: it goes, unless it is needed again soon. Nothing happens if it could not be entered."""
        entered = self._entered()
        if not entered or entered[-1] != index:
            return
        with self._lock:
            entered.pop()
            soon = self._soon()
            for seat in self._units[index]:
                self._release(seat, keep=seat in soon)
            if index in self._wanted():
                self._coming.add(index)

    def inside(self) -> bool:
        """Whether this thread computes with the model."""
        return bool(self._entered()) or self._cursor().inside

    @contextmanager
    def fetched(self, tensors: list[Tensor]) -> Generator[None]:
        """Within it single tensors are there, which no unit in use has brought."""
        seats = [self._seats[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]
        with self._lock:
            self._take(seats, asked=False)
        try:
            yield
        finally:
            with self._lock:
                for seat in seats:
                    self._release(seat)

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        with self._lock:
            self._carrier.close()
            for seat in self._seats.values():
                forget(seat.tensor)
                seat.tensor.data = seat.parcel.home
                seat.arrival = None

    def _ask(self, seats: Sequence[Seat]) -> bool:
        """Begin to bring the seats that are away; False if none is."""
        away = [seat for seat in seats if seat.arrival is None]
        if not away:
            return False
        arrival = self._carrier.bring([seat.parcel for seat in away])
        for at, seat in enumerate(away):
            seat.arrival, seat.at = arrival, at
            self.stats.bytes_brought += seat.parcel.home.nbytes
        return True

    def _take(self, seats: Sequence[Seat], *, asked: bool) -> None:
        """Wait for seats and put their tensors in place; `asked` if that was begun ahead of their turn."""
        self.stats.num_brought += 1
        if self._ask(seats) and not asked:
            self.stats.num_missed += 1
        try:
            arrived = {arrival: arrival.wait() for seat in seats if (arrival := seat.arrival) is not None}
        except BaseException:
            for seat in seats:
                if seat.users == 0:
                    seat.arrival = None  # asked for again the next time
            raise
        for seat in seats:
            seat.users += 1
            if seat.users == 1 and seat.arrival is not None:
                call_back(seat.tensor)
                seat.tensor.data = arrived[seat.arrival][seat.at]
                seat.version = seat.tensor._version  # pyright: ignore[reportPrivateUsage] it has no other name

    def _release(self, seat: Seat, *, keep: bool = False) -> None:
        seat.users -= 1
        if seat.users:
            return
        if seat.tensor._version != seat.version:  # pyright: ignore[reportPrivateUsage]
            with torch.no_grad():
                seat.parcel.home.copy_(
                    seat.tensor
                )  # written to while it was here: a running mean, for example
        if not keep:
            seat.arrival = None
        seat.tensor.data = seat.parcel.home
        send_away(seat.tensor, self)

    def _look_ahead(self) -> None:
        """Ask for what the threads will use next, and forget what they will not."""
        wanted = self._wanted()
        if unwanted := self._coming - wanted.keys():
            soon = self._soon()
            for index in unwanted:
                self._coming.discard(index)
                for seat in self._units[index]:
                    if seat.users == 0 and seat not in soon:
                        seat.arrival = None
        for index in wanted:
            if self._ask(self._units[index]):
                self._coming.add(index)

    def _wanted(self) -> dict[int, None]:
        return {index: None for cursor in self._cursors for index in cursor.ahead}

    def _soon(self) -> set[Seat]:
        return {seat for index in self._wanted() for seat in self._units[index]}

    def _cursor(self) -> Cursor:
        cursor: Cursor | None = getattr(self._own, "cursor", None)
        if cursor is None:
            cursor = self._own.cursor = Cursor(self._order, self._depth)
            with self._lock:
                self._cursors.add(cursor)
        return cursor

    def _entered(self) -> list[int]:
        """The units that this thread is in."""
        entered: list[int] | None = getattr(self._own, "entered", None)
        if entered is None:
            entered = self._own.entered = []
        return entered
