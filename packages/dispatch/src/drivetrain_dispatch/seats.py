"""Tensors that come and go: who claims them, and whose memory they take meanwhile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_dispatch.away import Fetcher, call_back, forget, send_away
from drivetrain_dispatch.carrier import Arrival, Carrier, Parcel


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


class Seats:
    """The seats of a model. Whoever calls holds the lock of the model's engine.

    Args:
        seats: Each once.
        fetcher: Who is asked for one that nobody has brought.
    """

    def __init__(self, seats: Iterable[Seat], fetcher: Fetcher) -> None:
        self.stats = OffloadStats()
        self._fetcher = fetcher
        self._carrier = Carrier()
        self._of_tensors = {id(seat.tensor): seat for seat in seats}
        self._of_memory: dict[int, Seat] = {}  # of those in place, by where their values are
        for seat in self._of_tensors.values():
            seat.tensor.data = seat.parcel.home
            send_away(seat.tensor, fetcher)

    def of_tensors(self, tensors: Iterable[Tensor]) -> list[Seat]:
        """The seats of parameters and buffers, each once."""
        return [self._of_tensors[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]

    def in_place(self, tensor: Tensor) -> Seat | None:
        """The seat whose values a tensor shares, if it is in place."""
        return self._of_memory.get(tensor.untyped_storage().data_ptr())

    def claim(self, seats: Sequence[Seat]) -> bool:
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

    def give_up(self, seats: Sequence[Seat]) -> None:
        """Need seats no more; what nobody claims gives its memory back."""
        for seat in seats:
            seat.claims -= 1
            if seat.claims == 0:
                seat.arrival = None

    def arrived(self, seats: Sequence[Seat]) -> list[Tensor]:
        """The values of claimed seats, once they are there.

        Raises:
            Exception: Whatever kept them from coming.
        """
        return [seat.arrival.wait()[seat.at] for seat in seats if seat.arrival is not None]

    def put(self, seats: Sequence[Seat], values: Sequence[Tensor]) -> None:
        """Put values that have arrived in place."""
        for seat, value in zip(seats, values, strict=True):
            seat.users += 1
            if seat.users == 1:
                call_back(seat.tensor)
                seat.tensor.data = value
                seat.version = seat.tensor._version  # pyright: ignore[reportPrivateUsage] it has no other name
                self._of_memory[value.untyped_storage().data_ptr()] = seat

    def release(self, seats: Sequence[Seat]) -> None:
        """Nobody computes with them for now: what is stored takes their place. The claim goes too."""
        for seat in seats:
            seat.users -= 1
            if seat.users == 0:
                tensor, home = seat.tensor, seat.parcel.home
                self._of_memory.pop(tensor.untyped_storage().data_ptr(), None)
                if tensor._version != seat.version:  # pyright: ignore[reportPrivateUsage]
                    with torch.no_grad():
                        home.copy_(tensor)  # written to while it was here
                tensor.data = home
                send_away(tensor, self._fetcher)
        self.give_up(seats)

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        self._carrier.close()
        for seat in self._of_tensors.values():
            forget(seat.tensor)
            seat.tensor.data = seat.parcel.home
            seat.arrival = None
