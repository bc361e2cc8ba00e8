"""Call kubectl, with words that no shell reads.

kubectl has three advantages over Kubernetes' Python client: a user of the cluster has already set it up, login
included; it is released with Kubernetes itself; and a call costs less than the import of the client.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.system_command import hint_for

KUBECTL = "kubectl"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_HINTS = {
    "no matches for kind": "JobSet is not installed in the cluster; its administrator installs it as "
    "https://jobset.sigs.k8s.io says",
    "alreadyexists": "a job of this name exists; say another --name, or cancel that one first",
    "(notfound): jobsets": "it is not there, or no longer; `kubectl get jobsets --all-namespaces` lists all",
    "connection to the server": "kubectl reaches no cluster; `kubectl cluster-info` shows which it looks for",
    "strict decoding error": "the cluster's JobSet is older than 0.6, which drivetrain needs",
    "unknown field": "the cluster's JobSet is older than 0.6, which drivetrain needs",
}


def parse_job_id(job_id: str) -> tuple[str, str]:
    """Return namespace and name of "NAMESPACE/NAME"; ClusterError for text that kubectl might read as an option."""
    namespace, slash, name = job_id.partition("/")
    if not slash or _NAME.fullmatch(namespace) is None or _NAME.fullmatch(name) is None:
        raise ClusterError(f"job {job_id!r}: a job on kubernetes is NAMESPACE/NAME, such as default/train")
    return namespace, name


def start_kubectl(words: Sequence[str]) -> subprocess.Popen[str]:
    """Start kubectl; its output and errors are pipes."""
    try:
        return subprocess.Popen(
            [KUBECTL, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise ClusterError(
            "kubectl is not installed here: install it (apt-get install kubernetes-client, or "
            "https://kubernetes.io/docs/tasks/tools/), or take the manifest from --dry-run to where it is"
        ) from error


def run_kubectl(words: Sequence[str]) -> str:
    """Run kubectl to its end and return its output; a ClusterError holds kubectl's message and a hint."""
    process = start_kubectl(words)
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
    if process.returncode != 0:
        raise ClusterError(f"kubectl {words[0]} failed: {errors.strip()}{hint_for(errors, _HINTS)}")
    return output


def read_objects(words: Sequence[str]) -> Any:
    """Run a kubectl command that prints JSON, and return it as plain data."""
    return json.loads(run_kubectl([*words, "--output=json"]))
