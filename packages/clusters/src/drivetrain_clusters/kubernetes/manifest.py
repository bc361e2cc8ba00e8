"""The JobSet manifest of a job: one indexed Job with a pod for each node, as plain data and as YAML. Pure."""

import re
from typing import Any

import yaml

from drivetrain_clusters.kubernetes.options import REPLICATED_JOB, KubernetesOptions, object_name
from drivetrain_clusters.protocol import RESUME_EXIT_CODE, JobRequest
from drivetrain_clusters.request_values import memory_bytes

API_VERSION = "jobset.x-k8s.io/v1alpha2"
CONTAINER = "launcher"
# The time after the ranks have saved in which launcher and container end.
_MARGIN_SECONDS = 30
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_SUFFIXES = {2**40: "Ti", 10**12: "T", 2**30: "Gi", 10**9: "G", 2**20: "Mi", 10**6: "M"}
# Text that no version of YAML reads as anything but text. All other text is quoted: PyYAML alone would leave 1e3 and
# 0o17 bare, which Kubernetes' reader takes for numbers.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*([./-][A-Za-z0-9_]+)*", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})

Manifest = dict[str, Any]


def jobset_manifest(request: JobRequest, options: KubernetesOptions) -> Manifest:
    """Return the JobSet of a request.

    The JobSet starts all nodes again if its Job failed by DeadlineExceeded or PodFailurePolicy: a pod was preempted,
    or ended with exit code 75 after its ranks had saved. Any other failure, BackoffLimitExceeded, ends the JobSet.
    """
    name = object_name(request.name, request.num_nodes)
    rules = [{"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}]
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": _drop_unset(
            name=name,
            namespace=options.namespace,
            labels=None if options.queue is None else {_QUEUE_LABEL: options.queue},
        ),
        "spec": _drop_unset(
            network={"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            successPolicy={"operator": "All"},
            failurePolicy=_drop_unset(
                maxRestarts=request.max_requeues, rules=None if options.restart_failures else rules
            ),
            replicatedJobs=[
                {
                    "name": REPLICATED_JOB,
                    "replicas": 1,
                    "template": {"spec": _job_spec(name, request, options)},
                }
            ],
            ttlSecondsAfterFinished=options.ttl_seconds,
        ),
    }


def _drop_unset(**fields: Any) -> Manifest:
    """Return the fields of an object that have a value; Kubernetes has defaults for the others."""
    return {name: value for name, value in fields.items() if value is not None}


def _job_spec(name: str, request: JobRequest, options: KubernetesOptions) -> Manifest:
    limit, on_disruption = request.time_limit_seconds, {"type": "DisruptionTarget", "status": "True"}
    on_save = {"containerName": CONTAINER, "operator": "In", "values": [RESUME_EXIT_CODE]}
    # Kubernetes gives 64 MB by default, too little for the batches of several loader workers.
    shm = _drop_unset(
        medium="Memory", sizeLimit=None if options.shm_bytes is None else quantity(options.shm_bytes)
    )
    claims = (
        {
            "name": f"claim-{i}",
            "persistentVolumeClaim": {"claimName": mount.claim, "readOnly": mount.read_only},
        }
        for i, mount in enumerate(options.volumes)
    )
    pod_spec = _drop_unset(
        restartPolicy="Never",
        terminationGracePeriodSeconds=request.save_seconds + _MARGIN_SECONDS,
        # Else the launcher is process 1, for which Linux ignores SIGTERM unless a handler is there.
        shareProcessNamespace=True,
        containers=[_container(name, request, options)],
        volumes=[{"name": "shm", "emptyDir": shm}, *claims],
        serviceAccountName=options.service_account,
        priorityClassName=options.priority_class,
        imagePullSecrets=[{"name": secret} for secret in options.pull_secrets] or None,
        nodeSelector=dict(pair.split("=", 1) for pair in options.node_selector) or None,
        tolerations=[{"key": key, "operator": "Exists"} for key in options.tolerations] or None,
    )
    return _drop_unset(
        completionMode="Indexed",
        parallelism=request.num_nodes,
        completions=request.num_nodes,
        backoffLimit=0,
        # The pods get SIGTERM then, and have the time to save behind it.
        activeDeadlineSeconds=None if limit is None else limit - request.save_seconds,
        podFailurePolicy={
            "rules": [
                {"action": "FailJob", "onPodConditions": [on_disruption]},
                {"action": "FailJob", "onExitCodes": on_save},
            ]
        },
        template={"spec": pod_spec},
    )


def _container(name: str, request: JobRequest, options: KubernetesOptions) -> Manifest:
    cpus, memory, accelerators = request.cpus_per_node, request.memory_per_node, request.accelerators_per_node
    # Without requests of their own, the limits are also what is requested.
    limits = _drop_unset(
        cpu=None if cpus is None else str(cpus),
        memory=None if memory is None else quantity(memory_bytes(memory)),
        **{options.accelerator: str(accelerators) if accelerators else None},
    )
    # The variables that `placement` reads.
    own = {
        "DRIVETRAIN_KUBERNETES_JOB": name,
        "DRIVETRAIN_KUBERNETES_NODES": str(request.num_nodes),
        "DRIVETRAIN_KUBERNETES_MASTER": f"{name}-{REPLICATED_JOB}-0-0.{name}",
        "DRIVETRAIN_KUBERNETES_PORT": str(options.port),
    }
    restarts = {"name": "DRIVETRAIN_KUBERNETES_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": _RESTARTS}}}
    return _drop_unset(
        name=CONTAINER,
        image=options.image,
        imagePullPolicy=options.pull_policy,
        command=[literal(word) for word in request.command],
        workingDir=str(request.folder),
        env=[
            *({"name": variable, "value": value} for variable, value in own.items()),
            restarts,
            *({"name": each, "value": literal(value)} for each, value in request.environment.items()),
        ],
        envFrom=[{"secretRef": {"name": secret}} for secret in options.secrets] or None,
        resources={"limits": limits} if limits else None,
        volumeMounts=[
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"claim-{i}", "mountPath": mount.path, "readOnly": mount.read_only}
                for i, mount in enumerate(options.volumes)
            ),
        ],
    )


def literal(text: str) -> str:
    """Escape text so that Kubernetes replaces no $(NAME) in it."""
    return text.replace("$", "$$")


def quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it: a whole number of the largest unit that divides it."""
    for unit, suffix in _SUFFIXES.items():
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes all text that could be read as something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of lists too, as Kubernetes' own manifests do."""
        del indentless
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that repeated parts are written in full, without YAML aliases."""
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=110)
