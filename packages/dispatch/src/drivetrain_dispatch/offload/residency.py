"""The residency of offloaded tensors: the claims on them, and the tensors that modules see in their place."""

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
from drivetrain_dispatch.offload.transfer import Carrier, Parcel, PendingTransfer
from drivetrain_dispatch.offload.transfer_window import TransferWindow


class Owner(NamedTuple):
    """A module that has a parameter, and the parameter's name there.

    Attributes:
        module: A weak reference to the module, which refers to this object itself.
        name: The name of the parameter.
    """

    module: ref[nn.Module]
    name: str

    def attributes(self) -> dict[str, Any]:
        """Return the module's `__dict__`, whose names hide its parameters; empty once the module is freed."""
        module = self.module()
        return {} if module is None else module.__dict__


class Seat:
    """The residency of one offloaded tensor, which several units may use.

    While it is in use, modules see a tensor with its values as their attribute, in place of the parameter. A buffer
    has no gradient and may be assigned to: it holds the values itself. A packed weight is fetched for modules only,
    and nothing is written to it.

    Args:
        tensor: The parameter or buffer that the model holds.
        parcel: The stored values, and the device and dtype that they compute in.
        owners: The modules that have the parameter, at least one; none for a buffer.

    Attributes:
        arrival: The values on the device or in transfer there; None while nothing claims them.
        at: The index of the values in the arrival.
        claims: The number of units that use the tensor or expect to.
        users: The number of units that use it now.
        value: The values on the device, while in use.
        shown: The tensor that modules see.
        asked_version: The version of the stored values when they were requested.
        room_bytes: The bytes on the device that computes, during the transfer and after it.
        size_bytes: The bytes of the stored tensor.
        version: The version of the values when they arrived.
        packed: Whether the values consist of several tensors.
    """

    __slots__ = (
        "arrival", "asked_version", "at", "away", "claims", "here", "owners", "packed", "parcel", "room_bytes",
        "shown", "size_bytes", "tensor", "users", "value", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, parcel: Parcel, owners: Sequence[Owner] = ()) -> None:
        self.tensor = tensor
        self.parcel = parcel
        self.owners = owners
        self.arrival: PendingTransfer | None = None
        self.value: Tensor | None = None
        self.shown: Tensor | None = None
        self.size_bytes = parcel.size_bytes
        self.room_bytes = parcel.room_bytes
        self.at = self.claims = self.users = self.version = self.asked_version = 0
        self.away, self.here = class_away(tensor), type(tensor)
        self.packed = is_packed(tensor)


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """The counts of a model's uses of units, and of the bytes that were fetched for them.

    Attributes:
        num_used: The number of times that a unit was used.
        num_missed: The number of times that its transfer had not begun by then, because it was not expected or the
            window had no room: the forward stalled.
        bytes_brought: The total of bytes that were fetched.
    """

    num_used: int = 0
    num_missed: int = 0
    bytes_brought: int = 0


class Seats:
    """The seats of a model. Callers hold the engine's lock.

    Args:
        seats: The distinct seats of the model.
        fetcher: The engine that fetches a tensor which is used while its unit is not.
        window_bytes: The most bytes of fetched weights that each device may hold at once.
    """

    def __init__(
        self, seats: Iterable[Seat], fetcher: Fetcher, *, window_bytes: Mapping[torch.device, int]
    ) -> None:
        self.stats = OffloadStats()
        self._carrier = Carrier()
        self._of_tensors = {id(seat.tensor): seat for seat in seats}
        self._rooms = {device: TransferWindow(device, most) for device, most in window_bytes.items()}
        self._here: dict[Seat, None] = {}  # the seats in use
        self._ordinary = finalize(self, _make_ordinary, list(self._of_tensors.values()))
        self._ordinary.atexit = False  # torch may be torn down by then, and nothing uses the tensors any more
        for seat in self._of_tensors.values():
            if not seat.packed:
                seat.tensor.data = seat.parcel.home
                set_fetcher(seat.tensor, fetcher)
                seat.tensor.__class__ = seat.away  # type: ignore[assignment]

    def of_tensors(self, tensors: Iterable[Tensor]) -> list[Seat]:
        """Return the distinct seats of parameters and buffers."""
        return [self._of_tensors[key] for key in dict.fromkeys(id(tensor) for tensor in tensors)]

    def in_use(self, tensor: Tensor) -> Seat | None:
        """Return the seat in use whose values a tensor is a view of, bit for bit; None if there is none."""
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
        """Return whether any seat is in use."""
        return bool(self._here)

    def fits(self, seats: Sequence[Seat]) -> bool:
        """Return whether there is room for seats of one device."""
        missing = sum([seat.room_bytes for seat in seats if seat.arrival is None])
        return not missing or self._rooms[seats[0].parcel.device].fits(missing)

    def wait_for_room(self, seats: Sequence[Seat]) -> bool:
        """Wait until there is room for seats, or only seats in use are left; return whether it had to wait."""
        missing = sum([seat.room_bytes for seat in seats if seat.arrival is None])
        return missing > 0 and self._rooms[seats[0].parcel.device].wait_for(missing)

    def claim(self, seats: Sequence[Seat]) -> bool:
        """Claim seats, whatever room there is; return whether any had to be requested."""
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
        """Give up the claims on seats; seats without a claim release their memory."""
        given: _Given = {}
        for seat in seats:
            seat.claims -= 1
            if seat.claims == 0:
                _leave(seat, given)
        self._give_back(given)

    def value(self, seat: Seat) -> Tensor:
        """Return the values of a claimed seat, once they have arrived.

        Raises:
            Exception: The error of the transfer.
        """
        assert seat.arrival is not None
        return seat.arrival.wait()[seat.at]

    def put(self, seats: Sequence[Seat]) -> None:
        """Put the values of claimed seats in place, once they have arrived.

        After an error none is in place or claimed.

        Raises:
            Exception: The error of a transfer.
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
                    self._store(seat)  # first, so that what autograd saves from now on counts as unchanged
                self._show(seat, value)
                seat.users += 1
                num_put += 1
        except BaseException:
            self.release(seats[:num_put])
            self.give_up(seats[num_put:])
            raise

    def release(self, seats: Sequence[Seat]) -> None:
        """End a use of seats, and give up its claims; seats without a use show the stored tensor again."""
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
        """Show the values to modules, with a gradient path to the parameter where autograd needs one."""
        if seat.owners:
            shown, tracked = seat.shown, torch.is_grad_enabled() and seat.tensor.requires_grad
            if shown is None or (tracked and shown.grad_fn is None):
                shown = seat.shown = _borrow(seat.tensor, value) if tracked else _alike(seat.tensor, value)
                for owner in seat.owners:
                    attributes = owner.attributes()
                    # Skip a parameter that was replaced by another one.
                    if attributes and attributes["_parameters"].get(owner.name) is seat.tensor:
                        attributes[owner.name] = shown
                        if seat.packed:
                            lend_state(attributes, shown)
        elif seat.users == 0:
            seat.tensor.__class__ = seat.here  # type: ignore[assignment]
            seat.tensor.data = value
            seat.shown, seat.version = seat.tensor, version_of(seat.tensor)

    def _hide(self, seat: Seat) -> None:
        """Show the stored tensor to modules, after storing what was written to the values."""
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
        """Store what was written to the values since they arrived."""
        values = seat.value if seat.owners else seat.tensor
        assert values is not None
        if (version := version_of(values)) != seat.version and not seat.packed:
            with torch.no_grad():
                seat.parcel.home.copy_(values)
            if seat.owners:
                increment_version(seat.tensor)
            seat.version = version

    def close(self) -> None:
        """Make every tensor an ordinary one again, with the stored values."""
        self._carrier.close()
        self._ordinary()


def _make_ordinary(seats: Iterable[Seat]) -> None:
    """Make tensors ordinary again, including those that outlive their model."""
    for seat in seats:
        if not seat.packed:
            seat.tensor.__class__ = seat.here  # type: ignore[assignment]
            set_fetcher(seat.tensor, None)
            seat.tensor.data = seat.parcel.home
        seat.arrival = None


# The bytes that are released, by device and, if nothing has used it, by arrival.
_Given: TypeAlias = dict[tuple[torch.device, PendingTransfer | None], int]


def _leave(seat: Seat, given: _Given) -> None:
    """Drop the values of an unclaimed seat, and note the bytes that this releases."""
    arrival = seat.arrival
    if arrival is not None:
        seat.arrival = None
        key = (seat.parcel.device, None if arrival.used else arrival)
        given[key] = given.get(key, 0) + seat.room_bytes


class _Borrowed(torch.autograd.Function):
    """A function from a parameter to its fetched values; the gradient returns to the device that stores it."""

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
    """Return the values with the parameter's `requires_grad`."""
    # F.linear sums non-contiguous inputs in another order if it is set, even under no_grad (torch 2.15).
    return values.detach().requires_grad_() if parameter.requires_grad else values


def version_of(tensor: Tensor) -> int:
    """Return torch's count of the in-place writes to a tensor."""
    return tensor._version  # pyright: ignore[reportPrivateUsage] torch has no other name for it
