"""The options of a job on Kubernetes, and the names that Kubernetes accepts."""

import re
from dataclasses import dataclass, fields

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest
from drivetrain_clusters.request_values import OptionReader, memory_bytes

# The service of the job needs a name that begins with a letter (RFC 1035); most other objects do not.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_QUALIFIED = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(_QUALIFIED, re.ASCII)
_KEY_VALUE = re.compile(_QUALIFIED + r"=([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:,\0-\37]{0,511}(:ro)?", re.ASCII)
_PULL_POLICY = re.compile(r"Always|IfNotPresent|Never")

# The name of the one replicated job, in the host names of its pods.
REPLICATED_JOB = "node"
# The longest name of a Kubernetes object that is also a host name.
_MOST = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimMount:
    """A persistent volume claim, and the folder at which the pods see it."""

    claim: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The options of a job on Kubernetes; None stands for Kubernetes' default, or for no value.

    Attributes:
        image: The image of the pods. It holds drivetrain, and the script if no volume holds that.
        accelerator: The resource that stands for one accelerator.
        shm_bytes: The size of /dev/shm; None for as much as the memory of the pod.
        secrets: The secrets whose keys become variables of the job; `pull_secrets` are for the image's registry.
        queue: The queue of Kueue that admits the job.
        node_selector: Labels, as "key=value", that a node must have.
        tolerations: Keys of the taints that the pods tolerate.
        ttl_seconds: The time after which a finished job is deleted.
        restart_failures: Whether a failed job starts again, as a preempted job always does.
    """

    image: str
    namespace: str | None = None
    accelerator: str = "nvidia.com/gpu"
    port: int = 29500
    shm_bytes: int | None = None
    pull_policy: str | None = None
    pull_secrets: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    queue: str | None = None
    volumes: tuple[ClaimMount, ...] = ()
    node_selector: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    ttl_seconds: int | None = None
    restart_failures: bool = False


# The option of each field, as users say it.
OPTION_NAMES = tuple(
    sorted(each.name.removesuffix("_bytes").replace("_", "-") for each in fields(KubernetesOptions))
)


def read_kubernetes_options(request: JobRequest) -> KubernetesOptions:
    """Read the options of a request; a ClusterError names an unknown, missing or wrong option."""
    read = OptionReader("kubernetes", request.options, OPTION_NAMES)
    image = read.matching("image", _IMAGE, "the name of an image, such as registry.example.org/train:2.1")
    if image is None:
        raise ClusterError(
            "kubernetes needs the image that holds drivetrain and the script: --option image=NAME"
        )
    shm = request.options.get("shm")
    return KubernetesOptions(
        image=image,
        namespace=read.matching("namespace", _LABEL, "the name of a namespace: a-z, 0-9 and hyphens"),
        accelerator=read.matching("accelerator", _KEY, "the name of a resource, such as amd.com/gpu")
        or "nvidia.com/gpu",
        port=read.number("port", least=1024, most=65535) or 29500,
        shm_bytes=None if shm is None else memory_bytes(shm),
        pull_policy=read.matching("pull-policy", _PULL_POLICY, "Always, IfNotPresent or Never"),
        pull_secrets=read.several("pull-secrets", _SUBDOMAIN, "the name of a secret"),
        secrets=read.several("secrets", _SUBDOMAIN, "the name of a secret"),
        service_account=read.matching("service-account", _SUBDOMAIN, "the name of a service account"),
        priority_class=read.matching("priority-class", _SUBDOMAIN, "the name of a priority class"),
        queue=read.matching("queue", _LABEL_VALUE, "the name of a queue of Kueue"),
        volumes=_volumes(read.several("volumes", _VOLUME, "CLAIM:/FOLDER or CLAIM:/FOLDER:ro")),
        node_selector=read.several("node-selector", _KEY_VALUE, "LABEL=VALUE"),
        tolerations=read.several("tolerations", _KEY, "the key of a taint"),
        ttl_seconds=read.number("ttl-seconds", least=0),
        restart_failures=read.truth("restart-failures"),
    )


def _volumes(texts: tuple[str, ...]) -> tuple[ClaimMount, ...]:
    mounts: list[ClaimMount] = []
    for text in texts:
        claim, path, *mode = text.split(":")
        mounts.append(ClaimMount(claim=claim, path=path, read_only=bool(mode)))
    paths = [mount.path.rstrip("/") for mount in mounts]
    for path in ("/dev/shm", *paths):
        if paths.count(path) > (0 if path == "/dev/shm" else 1):
            raise ClusterError(
                f"--option volumes={','.join(texts)}: {path} is mounted twice; say another folder"
            )
    return tuple(mounts)


def object_name(name: str, num_nodes: int) -> str:
    """Return a job's name as a name of a Kubernetes object, short enough that pods' names can add their ranks.

    Letters become lower case, other characters that Kubernetes forbids hyphens. If none is left, raise ClusterError.
    """
    small = re.sub(r"[^a-z0-9]+", "-", name.lower(), flags=re.ASCII).strip("-")
    if not small:
        raise ClusterError(
            f"--name {name!r}: kubernetes allows a-z, 0-9 and hyphens, and none of them is in it"
        )
    if small[0].isdigit():
        small = f"job-{small}"
    # NAME-node-0-RANK-xxxxx is the name of a pod.
    most = _MOST - len(f"-{REPLICATED_JOB}-0-{num_nodes - 1}-xxxxx")
    if len(small) > most:
        raise ClusterError(
            f"--name {name!r}: has {len(small)} letters as the name of a Kubernetes object; {most} are allowed"
        )
    return small
