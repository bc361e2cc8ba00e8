"""Tensors that come and go: who claims them, and what modules meet in their place."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from drivetrain_dispatch.model.bitsandbytes import lend_state, return_state
from drivetrain_dispatch.model.tensor_subclass import is_packed
from drivetrain_dispatch.offload.parameter import Fetcher, class_away, plainly, set_fetcher
from drivetrain_dispatch.offload.transfer import Arrival, Carrier, Parcel
from drivetrain_dispatch.offload.transfer_window import Room


class Owner(NamedTuple):
    """A module that has a parameter, and its name there.

    Attributes:
        module: Gives the module, None once it is gone: what the module refers to must not hold it.
        name: The parameter's.
    """

    module: ref[nn.Module]
    name: str

    def attributes(self) -> dict[str, Any]:
        """The module's own: what stands there comes before its parameters."""
        module = self.module()
        return {} if module is None else module.__dict__


class Seat:
    """A tensor that comes and goes. Several units may use it.

    While it is in use, modules meet a tensor with its values as their attribute, in the parameter's place. A buffer
    has no gradient and may be assigned to: it takes the values itself. A weight that is packed is brought to modules
    alone, and nothing is written to it.

    Args:
        tensor: The parameter or buffer, as the model holds it.
        parcel: Its values and where they are computed.
        owners: The modules that have it if it is a parameter, at least one; of a buffer none.

    Attributes:
        arrival: Its values on the device or on their way there; None while nobody claims them.
        at: Their place in the arrival.
        claims: How many units are using it or expect to.
        users: How many are using it.
        value: Its values, while it is in use.
        shown: What modules meet.
        asked_version: The stored values', when they were asked for.
        room_bytes: What it takes on the device that computes, while it comes and while it is there.
        size_bytes: Of what is stored.
        version: The values', when they came.
        packed: Whether they are several tensors.
    """

    __slots__ = (
        "arrival", "asked_version", "at", "away", "claims", "here", "owners", "packed", "parcel", "room_bytes",
        "shown", "size_bytes", "tensor", "users", "value", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, parcel: Parcel, owners: Sequence[Owner] = ()) -> None:
        self.tensor = tensor
        self.parcel = parcel
        self.owners = owners
        self.arrival: Arrival | None = None
        self.value: Tensor | None = None
        self.shown: Tensor | None = None
        self.size_bytes = parcel.size_bytes
        self.room_bytes = parcel.room_bytes
        self.at = self.claims = self.users = self.version = self.asked_version = 0
        self.away, self.here = class_away(tensor), type(tensor)
        self.packed = is_packed(tensor)


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """What a model's forwards have brought.

    Attributes:
        num_used: How often a unit was used.
        num_missed: How often it was not on its way when its turn came, be it that nobody expected it or that the
            window had no room: the forward stood still.
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
        window_bytes: Of each device that computes, what may be there of them at once.
    """

    def __init__(
        self, seats: Iterable[Seat], fetcher: Fetcher, *, window_bytes: Mapping[torch.device, int]
    ) -> None:
        self.stats = OffloadStats()
        self._carrier = Carrier()
        self._of_tensors = {id(seat.tensor): seat for seat in seats}
        self._rooms = {device: Room(device, most) for device, most in window_bytes.items()}
        self._here: dict[Seat, None] = {}  # those that are in use
        self._ordinary = finalize(self, _make_ordinary, list(self._of_tensors.values()))
        self._ordinary.atexit = False
        for seat in self._of_tensors.values():
            if not seat.packed:
                seat.tensor.data = seat.parcel.home
                set_fetcher(seat.tensor, fetcher)
                seat.tensor.__class__ = seat.away  # type: ignore[assignment]

    def of_tensors(self, tensors: Iterable[Tensor]) -> list[Seat]:
        """The seats of parameters and buffers, each once."""
        return [self._of_tensors[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]

    def in_use(self, tensor: Tensor) -> Seat | None:
        """The seat that is in use and of whose values a tensor is a view, bit by bit."""
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        memory = tensor.untyped_storage().data_ptr()
        for seat in self._here:
            value = seat.value
            if (
                value is not None
                and not seat.packed
                and value.dtype == tensor.dtype
                and value.untyped_storage().data_ptr() == memory
            ):
                return seat
        return None

    def some_in_use(self) -> bool:
        """Whether anything is."""
        return bool(self._here)

    def fits(self, seats: Sequence[Seat]) -> bool:
        """Whether there is room for seats that one device computes."""
        missing = sum([seat.room_bytes for seat in seats if seat.arrival is None])
        return not missing or self._rooms[seats[0].parcel.device].fits(missing)

    def wait_for_room(self, seats: Sequence[Seat]) -> bool:
        """Wait until there is room for seats, or all that is there is in use; whether the device was behind."""
        missing = sum([seat.room_bytes for seat in seats if seat.arrival is None])
        return missing > 0 and self._rooms[seats[0].parcel.device].wait_for(missing)

    def claim(self, seats: Sequence[Seat]) -> bool:
        """Ask for seats, whatever room there is; whether any was not there or on its way."""
        parcels: list[Parcel] = []
        for seat in seats:
            seat.claims += 1
            if seat.arrival is None:
                seat.at = len(parcels)
                parcels.append(seat.parcel)
        if not parcels:
            return False
        try:
            arrival = self._carrier.bring(parcels)
        except BaseException:
            self.give_up(seats)
            raise
        for seat in seats:
            if seat.arrival is None:
                seat.arrival = arrival
                seat.asked_version = version_of(seat.tensor)
                self._rooms[seat.parcel.device].take(seat.room_bytes)
                self.stats.bytes_brought += seat.size_bytes
        return True

    def give_up(self, seats: Sequence[Seat]) -> None:
        """Need seats no more; what nobody claims gives its memory back."""
        given: _Given = {}
        for seat in seats:
            seat.claims -= 1
            if seat.claims == 0:
                _leave(seat, given)
        self._give_back(given)

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
                assert seat.arrival is not None
                value = seat.arrival.wait()[seat.at]
                if seat.users == 0:
                    seat.value = value
                    seat.version = version_of(value)
                    self._here[seat] = None
                else:
                    self._store(seat)  # what autograd saves from now on has not changed since
                self._show(seat, value)
                seat.users += 1
                num_put += 1
        except BaseException:
            self.release(seats[:num_put])
            self.give_up(seats[num_put:])
            raise

    def release(self, seats: Sequence[Seat]) -> None:
        """Nobody computes with them for now: what is stored takes their place. The claim goes too."""
        given: _Given = {}
        for seat in seats:
            seat.users -= 1
            if seat.users == 0:
                del self._here[seat]
                self._hide(seat)
            seat.claims -= 1
            if seat.claims == 0:
                _leave(seat, given)
        self._give_back(given)

    def _give_back(self, given: "_Given") -> None:
        for (device, unused), size_bytes in given.items():
            self._rooms[device].give_back(size_bytes, None if unused is None else unused.given_up())

    def _show(self, seat: Seat, value: Tensor) -> None:
        """Let modules meet the values; with a way back to the parameter where autograd wants one."""
        if seat.owners:
            shown, tracked = seat.shown, torch.is_grad_enabled() and seat.tensor.requires_grad
            if shown is None or (tracked and shown.grad_fn is None):
                shown = seat.shown = _borrow(seat.tensor, value) if tracked else _alike(seat.tensor, value)
                for owner in seat.owners:
                    attributes = owner.attributes()
                    # Not another one that somebody has put there.
                    if attributes and attributes["_parameters"].get(owner.name) is seat.tensor:
                        attributes[owner.name] = shown
                        if seat.packed:
                            lend_state(attributes, shown)
        elif seat.users == 0:
            seat.tensor.__class__ = seat.here  # type: ignore[assignment]
            seat.tensor.data = value
            seat.shown, seat.version = seat.tensor, version_of(seat.tensor)

    def _hide(self, seat: Seat) -> None:
        """Let modules meet what is stored; what was written into the values is stored first."""
        self._store(seat)
        for owner in seat.owners:
            attributes = owner.attributes()
            if attributes.get(owner.name) is seat.shown:
                del attributes[owner.name]
                if seat.packed:
                    return_state(attributes)
        if not seat.owners:
            seat.tensor.data = seat.parcel.home
            seat.tensor.__class__ = seat.away  # type: ignore[assignment]
        seat.value = seat.shown = None

    def _store(self, seat: Seat) -> None:
        """Store what was written into the values since they came."""
        values = seat.value if seat.owners else seat.tensor
        assert values is not None
        if (version := version_of(values)) != seat.version and not seat.packed:
            with torch.no_grad():
                seat.parcel.home.copy_(values)
            if seat.owners:
                increment_version(seat.tensor)
            seat.version = version

    def close(self) -> None:
        """Make every tensor an ordinary one again, its values those that are stored."""
        self._carrier.close()
        self._ordinary()


def _make_ordinary(seats: Iterable[Seat]) -> None:
    """Also those tensors of a model that is gone that somebody holds."""
    for seat in seats:
        if not seat.packed:
            seat.tensor.__class__ = seat.here  # type: ignore[assignment]
            set_fetcher(seat.tensor, None)
            seat.tensor.data = seat.parcel.home
        seat.arrival = None


# What is given back of each device, and of each arrival that nobody has used.
_Given: TypeAlias = dict[tuple[torch.device, Arrival | None], int]


def _leave(seat: Seat, given: _Given) -> None:
    """Let go of what nobody claims, and note what memory that gives back."""
    arrival = seat.arrival
    if arrival is not None:
        seat.arrival = None
        key = (seat.parcel.device, None if arrival.used else arrival)
        given[key] = given.get(key, 0) + seat.room_bytes


class _Borrowed(torch.autograd.Function):
    """The values of a parameter where they are computed; their gradient goes to where the parameter is stored."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: list[Tensor]) -> Tensor:
        ctx.device, ctx.dtype = parameter.device, parameter.dtype
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.dtype.itemsize < gradients[0].dtype.itemsize:
            warnings.warn(
                f"a weight that is stored in {ctx.dtype} and computed in {gradients[0].dtype} is trained, in "
                f"{ctx.dtype}: small steps are lost; store what is trained in {gradients[0].dtype}",
                stacklevel=2,
            )
        return gradients[0].to(ctx.device, ctx.dtype), None


def _borrow(parameter: Tensor, values: Tensor) -> Tensor:
    shown = plainly(_Borrowed.apply, parameter, [values])
    assert isinstance(shown, Tensor)
    return shown


def _alike(parameter: Tensor, values: Tensor) -> Tensor:
    """The values as torch's functions meet the parameter: for one that learns, some add up in another order."""
    # F.linear does, of inputs that are not contiguous, also where no gradient is computed (torch 2.15).
    return values.detach().requires_grad_() if parameter.requires_grad else values


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as torch counts it."""
    return tensor._version  # pyright: ignore[reportPrivateUsage] torch has no other name for it
