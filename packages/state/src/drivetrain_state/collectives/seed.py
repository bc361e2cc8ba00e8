"""Random numbers across ranks, devices and restarts: seeding, generator states, deterministic kernels."""

import random
import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from logging import getLogger
from typing import Any, Literal, get_args

import torch

from drivetrain_config import environ
from drivetrain_state.collectives.operations import gather_object
from drivetrain_state.compat import xla_in_use
from drivetrain_state.context import Context
from drivetrain_state.mesh import View

RngKind = Literal["python", "numpy", "torch", "accelerator"]

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")  # the two values that NVIDIA's documentation allows

logger = getLogger(__name__)


def derive_seed(seed: int, *, rank: int, step: int = 0) -> int:
    """Return the BLAKE2b hash of `seed`, `rank` and `step` as a 63-bit seed.

    Streams of different ranks, steps and seeds differ, unlike with seed + rank, where rank 1 of seed 1 equals rank 0
    of seed 2.
    """
    digest = blake2b(f"{seed},{rank},{step}".encode(), digest_size=8, person=b"drivetrain").digest()
    return int.from_bytes(digest, "big") >> 1


def set_seed(seed: int, *, rank_offset: int = 0, deterministic: bool = False) -> int:
    """Seed Python, NumPy (if it is imported), torch and its accelerators, and return the seed that they received.

    Args:
        seed: The seed, from 0 to 2**63 - 1.
        rank_offset: 0 uses `seed` itself, the same on every rank. Another number, such as the rank, uses
            `derive_seed(seed, rank=rank_offset)`, which differs between ranks, as for data augmentation.
        deterministic: Whether torch may use only deterministic kernels from now on.

    Raises:
        ValueError: If `seed` is out of range.
        RuntimeError: If `deterministic` is set and cuBLAS is not configured for it.

    Example:
        >>> set_seed(7)
        7
        >>> first = torch.rand(2)
        >>> set_seed(7)
        7
        >>> torch.equal(first, torch.rand(2))
        True
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: an integer from 0 to 2**63 - 1 is allowed")
    used = derive_seed(seed, rank=rank_offset) if rank_offset else seed
    if deterministic:
        chosen = environ.read(_CUBLAS_WORKSPACE) or ""
        if torch.cuda.is_available() and chosen not in _CUBLAS_DETERMINISTIC:
            raise RuntimeError(
                f"deterministic=True: cuBLAS needs {_CUBLAS_WORKSPACE}=:4096:8, which is {chosen or 'not set'!r}. "
                "Connect with StateSettings(deterministic=True), use deterministic_algorithms(), or set it first"
            )
        torch.use_deterministic_algorithms(True)
    _seed_all(used)
    return used


def reseed(seed: int, *, rank: int, step: int, torch_alone: bool = False) -> int:
    """Seed every generator of `rank` for a resume at `step` with another world size, and return the derived seed.

    Saved states belong to the ranks of the earlier run and fit no other world size. The new streams depend on `seed`,
    `rank` and `step` alone: a repeated resume repeats the numbers. `rank` may also be the index of another part of
    the run that draws its own numbers. With `torch_alone`, Python's and NumPy's generators stay unchanged.
    """
    used = derive_seed(seed, rank=rank, step=step)
    (_seed_torch if torch_alone else _seed_all)(used)
    return used


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32] if seed >> 32 else seed)
    _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    torch.manual_seed(seed)  # seeds the accelerators too, once they are initialised
    if (xla := xla_in_use()) is not None:
        xla.set_rng_state(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator of this process as plain values and tensors, without pickling.

    The keys are python, torch, numpy if it is imported, accelerator (its `kind` and the `state` of the current
    device) if there is one, and torch_xla, a number, if the program computes on XLA.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if (numpy := _numpy()) is not None:
        of_numpy = numpy.random.get_state(legacy=False)
        state["numpy"] = {
            "bit_generator": of_numpy["bit_generator"],
            "key": torch.tensor(of_numpy["state"]["key"].tolist(), dtype=torch.int64),
            "position": int(of_numpy["state"]["pos"]),
            "has_gauss": int(of_numpy["has_gauss"]),
            "gauss": float(of_numpy["gauss"]),
        }
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module = torch.get_device_module(accelerator)
        state["accelerator"] = {"kind": accelerator.type, "state": module.get_rng_state()}
    if (xla := xla_in_use()) is not None:
        state["torch_xla"] = int(xla.get_rng_state())
    return state


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to a state from `rng_state`.

    A state is skipped with a warning if this process lacks its generator (NumPy not imported, another accelerator).
    """
    if "python" in state:
        of_python = state["python"]
        random.setstate((int(of_python["version"]), tuple(of_python["words"].tolist()), of_python["gauss"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    numpy, accelerator = _numpy(), torch.accelerator.current_accelerator(check_available=True)
    if "numpy" in state and numpy is None:
        logger.warning("the state holds NumPy's generator, but NumPy is not imported here: it is left out")
    elif "numpy" in state:
        saved = state["numpy"]
        key = numpy.array(saved["key"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(
            (saved["bit_generator"], key, saved["position"], saved["has_gauss"], saved["gauss"])
        )
    if "accelerator" in state:
        saved, here = state["accelerator"], accelerator.type if accelerator is not None else "none"
        if accelerator is not None and here == saved["kind"]:
            torch.get_device_module(accelerator).set_rng_state(saved["state"].cpu())
        else:
            skipped = "the state holds the generator of %s, but the accelerator here is %s: it is left out"
            logger.warning(skipped, saved["kind"], here)
    xla = xla_in_use()
    if "torch_xla" in state and xla is None:
        logger.warning(
            "the state holds XLA's generator, but this program does not compute on XLA: it is left out"
        )
    elif "torch_xla" in state:
        xla.set_rng_state(int(state["torch_xla"]))


def synchronize_rng_states(
    context: Context,
    kinds: Collection[RngKind] = ("python", "numpy", "torch", "accelerator"),
    *,
    over: View = "world",
) -> None:
    """Copy the existing generator states of the first rank of a view to its other ranks. Called on all ranks.

    `kinds` are the generators whose states are copied.
    """
    for kind in kinds:
        if kind not in get_args(RngKind):
            raise ValueError(f"kinds={kind!r}: known kinds are {', '.join(get_args(RngKind))}")
    mine = rng_state() if context.ranks(over).index == 0 else {}
    first, *_ = gather_object(context, {kind: mine[kind] for kind in kinds if kind in mine}, over=over)
    load_rng_state(first)


@contextmanager
def deterministic_algorithms() -> Generator[None]:
    """Run the block with deterministic kernels only; operations without a deterministic kernel raise an error.

    Enter the block before the first matrix product on a CUDA device: the call sets cuBLAS's environment variable,
    which cuBLAS reads once.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    chosen = environ.read(_CUBLAS_WORKSPACE) or ""
    value = chosen if chosen in _CUBLAS_DETERMINISTIC else _CUBLAS_DETERMINISTIC[0]
    with environ.exported(**{_CUBLAS_WORKSPACE: value}):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _numpy() -> Any:
    """Return NumPy if the program has imported it; else None, because its generator is then unused."""
    return sys.modules.get("numpy")
