"""Tensors that come and go: who claims them, and whose memory they take meanwhile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_dispatch.away import Fetcher, class_away, set_fetcher
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
        classes: The tensor's while its values are stored elsewhere, and while they are here.
    """

    __slots__ = ("arrival", "at", "claims", "classes", "parcel", "tensor", "users", "version")

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self.tensor = tensor
        self.parcel = parcel
        self.arrival: Arrival | None = None
        self.at = self.claims = self.users = self.version = 0
        self.classes = (class_away(tensor), type(tensor))


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
        self._carrier = Carrier()
        self._of_tensors = {id(seat.tensor): seat for seat in seats}
        self._here: dict[Seat, None] = {}  # those that are in use
        for seat in self._of_tensors.values():
            seat.tensor.data = seat.parcel.home
            set_fetcher(seat.tensor, fetcher)
            seat.tensor.__class__ = seat.classes[0]  # type: ignore[assignment]

    def of_tensors(self, tensors: Iterable[Tensor]) -> list[Seat]:
        """The seats of parameters and buffers, each once."""
        return [self._of_tensors[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]

    def in_use(self, tensor: Tensor) -> Seat | None:
        """The seat that is in use and shares its values with a tensor."""
        memory = tensor.untyped_storage().data_ptr()
        return next((seat for seat in self._here if seat.tensor.untyped_storage().data_ptr() == memory), None)

    def claim(self, seats: Sequence[Seat]) -> bool:
        """Ask for seats; whether any was not there or on its way."""
        missing = False
        for seat in seats:
            seat.claims += 1
            if seat.arrival is None:
                missing = True
        if missing:
            try:
                self._ask([seat for seat in seats if seat.arrival is None])
            except BaseException:
                self.give_up(seats)
                raise
        return missing

    def give_up(self, seats: Sequence[Seat]) -> None:
        """Need seats no more; what nobody claims gives its memory back."""
        for seat in seats:
            seat.claims -= 1
            if seat.claims == 0:
                seat.arrival = None

    def value(self, seat: Seat) -> Tensor:
        """The values of a claimed seat, once they are there.

        Raises:
            Exception: Whatever kept them from coming.
        """
        assert seat.arrival is not None
        return seat.arrival.wait()[seat.at]

    def put(self, seats: Sequence[Seat]) -> None:
        """Put claimed values in place, once they are there. After an error none is, nor claimed.

        Raises:
            Exception: Whatever kept them from coming.
        """
        num_put = 0
        try:
            for seat in seats:
                if seat.users == 0:
                    tensor, value = seat.tensor, self.value(seat)
                    tensor.__class__ = seat.classes[1]  # type: ignore[assignment]
                    tensor.data = value
                    seat.version = tensor._version  # pyright: ignore[reportPrivateUsage] it has no other name
                    self._here[seat] = None
                seat.users += 1
                num_put += 1
        except BaseException:
            self.release(seats[:num_put])
            self.give_up(seats[num_put:])
            raise

    def release(self, seats: Sequence[Seat]) -> None:
        """Nobody computes with them for now: what is stored takes their place. The claim goes too."""
        for seat in seats:
            seat.users -= 1
            if seat.users == 0:
                tensor, home = seat.tensor, seat.parcel.home
                del self._here[seat]
                if tensor._version != seat.version:  # pyright: ignore[reportPrivateUsage]
                    with torch.no_grad():
                        home.copy_(tensor)  # written to while it was here
                tensor.data = home
                tensor.__class__ = seat.classes[0]  # type: ignore[assignment]
        self.give_up(seats)

    def _ask(self, seats: Sequence[Seat]) -> None:
        arrival = self._carrier.bring([seat.parcel for seat in seats])
        for at, seat in enumerate(seats):
            seat.arrival, seat.at = arrival, at
            self.stats.bytes_brought += seat.parcel.home.nbytes

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        self._carrier.close()
        for seat in self._of_tensors.values():
            seat.tensor.__class__ = seat.classes[1]  # type: ignore[assignment]
            set_fetcher(seat.tensor, None)
            seat.tensor.data = seat.parcel.home
            seat.arrival = None
