"""Compare data across ranks before it is divided: the loader's settings, the sampler's draws and the samples.

If ranks had different samples or orders, some samples would be read twice or never.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from drivetrain_data.sampling.sample_signature import Place, Signature, alike

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "Every rank must be given all of the same data, which is divided here: build it without the rank or RANK, with "
    "files in sorted order, and draw random data with the same seed on every rank, after Accelerator(seed=...) or "
    "torch.manual_seed(...). Data that each rank is to keep for itself goes into a loader that is neither prepared "
    "nor sharded"
)


@dataclass(frozen=True, slots=True)
class FirstRead:
    """The samples that a rank read to compare them with those of other ranks."""

    signatures: Mapping[Place, Signature]
    problem: str = ""  # why there are no more, or none that can be compared

    def is_like(self, other: "FirstRead") -> bool:
        """Return whether another rank may have read the same samples; only places that both have read count."""
        places = self.signatures.keys() & other.signatures.keys()
        return all(alike(self.signatures[place], other.signatures[place]) for place in places)


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """The comparisons of the ranks that share a loader's data. Every method is called on all ranks of the group.

    If the first rank reads `for_all`, the other ranks' data may be missing, but must not differ.
    """

    group: dist.ProcessGroup
    for_all: bool

    @property
    def is_first(self) -> bool:
        """True on the first rank; the other ranks are compared with it."""
        return dist.get_rank(self.group) == 0

    @property
    def reads(self) -> bool:
        """True if this rank reads the data."""
        return self.is_first or not self.for_all

    def check_drawn(self, name: str, checksum: int) -> None:
        """Raise ValueError on all ranks if the checksum of a sampler's indices differs between ranks."""
        if self.for_all:  # no other rank draws
            return
        drawn = self._gathered(checksum)
        others = [rank for rank, other in enumerate(drawn) if other != drawn[0]]
        if others:
            raise ValueError(
                f"{name} drew another order on rank {others[0]} of those that share the data than on rank 0, and "
                "samples would be lost; let it draw from its own generators or the global ones, which get the same "
                "seed on every rank, or let one rank read for all, with dispatch=True"
            )

    def check_given(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError on all ranks unless the values that describe the loader are the same on all ranks."""
        by_rank = self._gathered(dict(facts))
        for rank, other in enumerate(by_rank):
            for name in {**by_rank[0], **other}:  # in the same order on every rank
                first, given = by_rank[0].get(name), other.get(name)
                if given != first and not (self.for_all and given in (None, 0)):
                    raise ValueError(
                        f"the ranks were given different data: {name}={first!r} on rank 0 of those that share it, "
                        f"and {name}={given!r} on rank {rank}. {_WAY_OUT}"
                    )

    def differing(self, name: str, read: FirstRead) -> int | None:
        """Return a rank known to have other samples than the first, or None. The first rank warns of unknowns."""
        by_rank = self._gathered(read)
        problem = next(((rank, each.problem) for rank, each in enumerate(by_rank) if each.problem), None)
        if problem is not None and self.is_first:
            logger.warning(
                "%s was not compared, or not all of it, between the ranks that share the data: on rank %d %s. If it "
                "divides itself by rank, most of it is read by no rank",
                name,
                *problem,
            )
        differ = (rank for rank, each in enumerate(by_rank) if not by_rank[0].is_like(each))
        return next(differ, None)

    def check_samples(self, name: str, found: FirstRead) -> None:
        """Raise ValueError on all ranks if the samples of a rank are known to differ from the first rank's."""
        rank = self.differing(name, found)
        if rank is None:
            return
        read = "rank 0 reads for all, and " if self.for_all else ""
        raise ValueError(
            f"{read}{name} gives other samples on rank {rank} of those that share the data than on rank 0, at the "
            f"same places. It seems to divide the data itself, and no rank would read most of the data. {_WAY_OUT}"
        )

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found
