"""A job on Ray as a frozen value, which the job's driver in the cluster receives."""

import base64
import json
import re
from dataclasses import dataclass

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest
from drivetrain_clusters.request_values import OptionReader, memory_bytes
from drivetrain_config.values.conversion import ConversionError, convert
from drivetrain_config.values.kinds import plain

# The variable in which the driver finds its job.
JOB_VARIABLE = "DRIVETRAIN_RAY_JOB"
# Linux hands a process no longer variable than 128 KiB.
_MOST_CHARACTERS = 120_000
_OPTIONS = ("accelerator", "address", "python", "strategy", "upload", "wait-seconds")
_ADDRESS = re.compile(r"https?://[A-Za-z0-9.:\[\]_/-]{1,500}", re.ASCII)
# The one word of a user that Ray's shell reads.
_PYTHON = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_./-]{0,500}", re.ASCII)
_STRATEGY = re.compile(r"auto|STRICT_SPREAD|SPREAD|PACK|STRICT_PACK")
_RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,100}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A request on Ray, with the options read.

    Attributes:
        job_id: The Jobs API's name for the job; empty before the job is submitted.
        accelerator: Ray's name of the resource that stands for one accelerator.
        strategy: The strategy of the placement group; "auto" for STRICT_SPREAD where there are enough nodes.
        wait_seconds: The time to wait for the resources; None for any time.
        address: The address of Ray's dashboard; None if Ray finds it.
        python: The driver's Python on the head node.
        upload: Whether the folder is copied to all nodes, which otherwise share it.
    """

    job_id: str = ""
    request: JobRequest
    accelerator: str = "GPU"
    strategy: str = "auto"
    wait_seconds: int | None = None
    address: str | None = None
    python: str = "python"
    upload: bool = False

    def encode(self) -> str:
        """Return the job as text that neither a shell nor Ray's variables change."""
        text = base64.urlsafe_b64encode(json.dumps(plain(self)).encode()).decode("ascii")
        if len(text) > _MOST_CHARACTERS:
            raise ClusterError(
                f"the command and variables of the job take {len(text)} characters, and Ray can hand on "
                f"{_MOST_CHARACTERS}; put long arguments into a file"
            )
        return text

    @classmethod
    def decode(cls, text: str) -> "RayJob":
        """Return the job from the text that `encode` returned."""
        try:
            return convert(json.loads(base64.urlsafe_b64decode(text)), cls)
        except (ValueError, ConversionError) as error:
            raise ClusterError(
                f"{JOB_VARIABLE} cannot be read: {error}; `drivetrain submit` sets it"
            ) from error

    @property
    def bundle(self) -> dict[str, float]:
        """The resources to reserve on each node, by Ray's names."""
        request = self.request
        found: dict[str, float] = {"CPU": request.cpus_per_node or 1}
        if request.memory_per_node is not None:
            found["memory"] = memory_bytes(request.memory_per_node)
        if request.accelerators_per_node:
            found[self.accelerator] = request.accelerators_per_node
        return found

    @property
    def entrypoint(self) -> str:
        """The command of the driver. As a shell reads it, it holds no text of the user but the path of Python."""
        return f"{self.python} -m drivetrain_clusters.ray.driver"


def plan_ray(request: JobRequest) -> RayJob:
    """Plan a request on Ray; a ClusterError names a wrong option, or a job too large for Ray."""
    read = OptionReader("ray", request.options, _OPTIONS)
    accelerator = read.matching("accelerator", _RESOURCE, "the name of a resource of Ray, such as GPU or TPU")
    strategy = read.matching("strategy", _STRATEGY, "auto, STRICT_SPREAD, SPREAD, PACK or STRICT_PACK")
    job = RayJob(
        request=request,
        accelerator=accelerator or "GPU",
        strategy=strategy or "auto",
        wait_seconds=read.number("wait-seconds", least=1),
        address=read.matching("address", _ADDRESS, "the address of Ray's dashboard, http://HOST:8265"),
        python=read.matching("python", _PYTHON, "a path of Python without spaces") or "python",
        upload=read.truth("upload"),
    )
    job.encode()
    if request.memory_per_node is not None:
        memory_bytes(request.memory_per_node)
    return job
