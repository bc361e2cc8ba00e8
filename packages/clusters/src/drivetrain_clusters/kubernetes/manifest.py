"""The JobSet manifest of a job: one indexed Job with a pod for each node, as plain data. Pure."""

from typing import Any

from drivetrain_clusters.kubernetes.options import REPLICATED_JOB, KubernetesOptions, object_name
from drivetrain_clusters.memory_size import memory_bytes
from drivetrain_clusters.protocol import RESUME_EXIT_CODE, JobRequest

API_VERSION = "jobset.x-k8s.io/v1alpha2"
CONTAINER = "launcher"
# The time after the ranks have saved in which launcher and container end.
_MARGIN_SECONDS = 30
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_SUFFIXES = (
    (2**40, "Ti"),
    (10**12, "T"),
    (2**30, "Gi"),
    (10**9, "G"),
    (2**20, "Mi"),
    (10**6, "M"),
)

Manifest = dict[str, Any]


def jobset_manifest(request: JobRequest, options: KubernetesOptions) -> Manifest:
    """Return the JobSet of a request.

    A pod that was preempted, or whose ranks have saved and ended with exit code 75, fails the Job at once for the
    reason PodFailurePolicy, and a Job that reaches its time for the reason DeadlineExceeded; the JobSet then starts
    all nodes again. Any other failure is a BackoffLimitExceeded, which ends the JobSet.

    Raises:
        ClusterError: The name of the job is not possible on Kubernetes.
    """
    name = object_name(request.name, request.num_nodes)
    metadata: Manifest = {"name": name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    if options.queue is not None:
        metadata["labels"] = {_QUEUE_LABEL: options.queue}
    failure: Manifest = {"maxRestarts": request.max_requeues}
    if not options.restart_failures:
        failure["rules"] = [
            {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}
        ]
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": failure,
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": _job_spec(name, request, options)}}
        ],
    }
    if options.ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_seconds
    return {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": metadata, "spec": spec}


def _job_spec(name: str, request: JobRequest, options: KubernetesOptions) -> Manifest:
    spec: Manifest = {
        "completionMode": "Indexed",
        "parallelism": request.num_nodes,
        "completions": request.num_nodes,
        "backoffLimit": 0,
    }
    if request.time_limit_seconds is not None:
        # The pods get SIGTERM then, and have the time to save behind it.
        spec["activeDeadlineSeconds"] = request.time_limit_seconds - request.save_seconds
    spec["podFailurePolicy"] = {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [RESUME_EXIT_CODE]},
            },
        ]
    }
    spec["template"] = {"spec": _pod_spec(name, request, options)}
    return spec


def _pod_spec(name: str, request: JobRequest, options: KubernetesOptions) -> Manifest:
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.save_seconds + _MARGIN_SECONDS,
        # Else the launcher is process 1, for which Linux ignores SIGTERM unless a handler is there.
        "shareProcessNamespace": True,
        "containers": [_container(name, request, options)],
        "volumes": _volumes(options),
    }
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class is not None:
        spec["priorityClassName"] = options.priority_class
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
    if options.node_selector:
        spec["nodeSelector"] = dict(pair.split("=", 1) for pair in options.node_selector)
    if options.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in options.tolerations]
    return spec


def _container(name: str, request: JobRequest, options: KubernetesOptions) -> Manifest:
    container: Manifest = {"name": CONTAINER, "image": options.image}
    if options.pull_policy is not None:
        container["imagePullPolicy"] = options.pull_policy
    container["command"] = [literal(word) for word in request.command]
    container["workingDir"] = str(request.folder)
    container["env"] = _variables(name, request, options)
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.secrets]
    if limits := _limits(request, options):
        container["resources"] = {"limits": limits}
    container["volumeMounts"] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        *(
            {"name": f"claim-{i}", "mountPath": mount.path, "readOnly": mount.read_only}
            for i, mount in enumerate(options.volumes)
        ),
    ]
    return container


def _variables(name: str, request: JobRequest, options: KubernetesOptions) -> list[Manifest]:
    """Return the variables that `placement` reads, and those of the job."""
    own = {
        "DRIVETRAIN_KUBERNETES_JOB": name,
        "DRIVETRAIN_KUBERNETES_NODES": str(request.num_nodes),
        "DRIVETRAIN_KUBERNETES_MASTER": f"{name}-{REPLICATED_JOB}-0-0.{name}",
        "DRIVETRAIN_KUBERNETES_PORT": str(options.port),
    }
    restarts = {"name": "DRIVETRAIN_KUBERNETES_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": _RESTARTS}}}
    return [
        *({"name": variable, "value": value} for variable, value in own.items()),
        restarts,
        *({"name": each, "value": literal(value)} for each, value in request.environment.items()),
    ]


def _limits(request: JobRequest, options: KubernetesOptions) -> Manifest:
    """Return the limits of a container; without requests of their own, they are also what is requested."""
    limits: Manifest = {}
    if request.cpus_per_node is not None:
        limits["cpu"] = str(request.cpus_per_node)
    if request.memory_per_node is not None:
        limits["memory"] = quantity(memory_bytes(request.memory_per_node))
    if request.accelerators_per_node:
        limits[options.accelerator] = str(request.accelerators_per_node)
    return limits


def _volumes(options: KubernetesOptions) -> list[Manifest]:
    # Kubernetes gives 64 MB by default, too little for the batches of several loader workers.
    shm: Manifest = {"medium": "Memory"}
    if options.shm_bytes is not None:
        shm["sizeLimit"] = quantity(options.shm_bytes)
    claims = (
        {
            "name": f"claim-{i}",
            "persistentVolumeClaim": {"claimName": mount.claim, "readOnly": mount.read_only},
        }
        for i, mount in enumerate(options.volumes)
    )
    return [{"name": "shm", "emptyDir": shm}, *claims]


def literal(text: str) -> str:
    """Return text that Kubernetes, which replaces $(NAME) in commands and variables, hands on as it was."""
    return text.replace("$", "$$")


def quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it: with the largest unit of which it is a whole number."""
    for unit, suffix in _SUFFIXES:
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)
