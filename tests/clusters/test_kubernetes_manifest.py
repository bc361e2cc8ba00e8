import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_clusters import ClusterError
from drivetrain_clusters.kubernetes.cluster import Kubernetes
from drivetrain_clusters.kubernetes.manifest import literal, quantity, to_yaml
from drivetrain_clusters.kubernetes.options import object_name
from drivetrain_clusters.protocol import JobRequest
from requests_of_jobs import hostile, make_request

FULL = {
    "image": "registry.example.org:5000/team/train:2.1",
    "namespace": "team",
    "accelerator": "amd.com/gpu",
    "port": "23456",
    "shm": "16GiB",
    "pull-policy": "Always",
    "pull-secrets": "registry-a,registry-b",
    "secrets": "wandb",
    "service-account": "trainer",
    "priority-class": "high",
    "queue": "team-queue",
    "volumes": "data:/data:ro,checkpoints:/checkpoints",
    "node-selector": "cloud.example.org/gpu=h100,zone=",
    "tolerations": "nvidia.com/gpu",
    "ttl-seconds": "0",
    "restart-failures": "yes",
}


@pytest.fixture
def validator() -> Any:
    """Kubernetes' published schemas."""
    return pytest.importorskip(
        "kubernetes_validate", reason="the schemas are not installed beside the launcher"
    )


@pytest.fixture
def jobset() -> Any:
    """JobSet's published definition, as a model that drops the fields that it does not have."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the models are not installed beside the launcher"
    )
    return models.JobsetV1alpha2JobSet


def manifest_of(request: JobRequest) -> dict[str, Any]:
    """The manifest as a reader of the written file has it."""
    (text,) = Kubernetes().plan(request).files.values()
    return yaml.safe_load(text)


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def batch_job(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = job_of(manifest)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": manifest["metadata"], "spec": spec}


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = job_of(manifest)["template"]["spec"]["containers"]
    return container


def expanded(text: str, variables: dict[str, str]) -> str:
    """The text after Kubernetes has replaced $(NAME), as its documentation defines it."""

    def replace(form: re.Match[str]) -> str:
        if form[0] == "$$":
            return "$"
        return variables.get(form[1], form[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def of_every_request(test: Callable) -> Callable:
    """Run a test with plain and with full options, with resources and without."""
    with_options = pytest.mark.parametrize("options", [{"image": "train"}, FULL], ids=["plain", "full"])
    resources = {"accelerators_per_node": 8, "cpus_per_node": 96, "memory_per_node": "1.5TB"}
    return with_options(pytest.mark.parametrize("changes", [{}, resources], ids=["none", "resources"])(test))


@of_every_request
def test_the_jobset_has_no_field_that_its_published_definition_does_not_have(
    jobset: Any, changes: dict[str, Any], options: dict[str, str]
) -> None:
    request = make_request(options=options, time_limit_seconds=7200, environment={"A": "b"}, **changes)
    manifest = manifest_of(request)
    assert jobset.from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize(
    "place",
    [
        ("spec",),
        ("spec", "network"),
        ("spec", "failurePolicy", "rules", 0),
        ("spec", "replicatedJobs", 0, "template", "spec", "podFailurePolicy"),
        ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0),
    ],
)
def test_the_definition_of_a_jobset_has_no_place_for_a_field_that_is_misspelt(
    jobset: Any, place: tuple[str | int, ...]
) -> None:
    manifest = manifest_of(make_request(options={"image": "train"}))
    part: Any = manifest
    for step in place:
        part = part[step]
    part["misspelt"] = "x"
    assert jobset.from_dict(manifest).to_dict() != manifest


def test_the_definition_of_a_jobset_refuses_a_value_of_another_type(jobset: Any) -> None:
    manifest = manifest_of(make_request(options=FULL))
    manifest["spec"]["failurePolicy"]["maxRestarts"] = "5"
    with pytest.raises(ValueError, match="maxRestarts"):
        jobset.from_dict(manifest)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@of_every_request
def test_the_job_of_the_jobset_is_valid_by_the_published_schema(
    validator: Any, version: str, changes: dict[str, Any], options: dict[str, str]
) -> None:
    request = make_request(options=options, time_limit_seconds=7200, environment={"A": "b"}, **changes)
    validator.validate(batch_job(manifest_of(request)), version, strict=True)


def test_the_schema_refuses_a_manifest_with_a_mistake(validator: Any) -> None:
    job = batch_job(manifest_of(make_request(options=FULL)))
    job["spec"]["template"]["spec"]["containers"][0]["workingdir"] = "/"
    with pytest.raises(validator.ValidationError, match="workingdir"):
        validator.validate(job, "1.37", strict=True)


def test_the_jobset_has_the_values_that_its_reference_documents() -> None:
    """The published definition says nothing of the words that a field may have."""
    manifest = manifest_of(make_request(options=FULL, max_requeues=5))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {
        "name": "train",
        "namespace": "team",
        "labels": {"kueue.x-k8s.io/queue-name": "team-queue"},
    }
    spec = manifest["spec"]
    assert spec["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "train",
        "publishNotReadyAddresses": True,
    }
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["failurePolicy"] == {"maxRestarts": 5}
    assert spec["ttlSecondsAfterFinished"] == 0
    (replicated,) = spec["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)


def test_a_preempted_or_saved_job_starts_again_and_a_failed_one_does_not() -> None:
    manifest = manifest_of(make_request(options={"image": "x"}, max_requeues=2))
    preempted, saved = job_of(manifest)["podFailurePolicy"]["rules"]
    assert preempted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert saved["onExitCodes"] == {"containerName": "launcher", "operator": "In", "values": [75]}
    assert {preempted["action"], saved["action"]} == {"FailJob"}
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 2
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["BackoffLimitExceeded"])
    ]


def test_the_pods_have_the_time_to_save() -> None:
    job = job_of(manifest_of(make_request(options={"image": "x"}, time_limit_seconds=3600, save_seconds=300)))
    assert job["activeDeadlineSeconds"] == 3300
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > 300
    assert job["template"]["spec"]["shareProcessNamespace"] is True


def test_the_pods_get_what_the_request_says() -> None:
    request = make_request(
        options=FULL,
        accelerators_per_node=8,
        cpus_per_node=96,
        memory_per_node="900GB",
        environment={"A": "1"},
    )
    manifest = manifest_of(request)
    container = container_of(manifest)
    assert container["resources"]["limits"] == {"cpu": "96", "memory": "900G", "amd.com/gpu": "8"}
    assert container["workingDir"] == "/workspace"
    assert {"name": "A", "value": "1"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    pod = job_of(manifest)["template"]["spec"]
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert container["volumeMounts"][:2] == [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "claim-0", "mountPath": "/data", "readOnly": True},
    ]
    assert pod["nodeSelector"] == {"cloud.example.org/gpu": "h100", "zone": ""}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "registry-a"}, {"name": "registry-b"}]


@settings(max_examples=40)
@given(st.lists(hostile, max_size=6), st.dictionaries(st.sampled_from("ABCD"), hostile), hostile)
def test_hostile_words_and_variables_arrive_as_they_are(
    words: list[str], variables: dict[str, str], folder: str
) -> None:
    request = make_request(
        command=("drivetrain", "launch", *words),
        environment=variables,
        folder=Path("/workspace") / folder.strip("/."),
        options={"image": "x"},
    )
    manifest = manifest_of(request)
    container = container_of(manifest)
    seen = {"X": "changed", "HOME": "changed"}
    assert tuple(expanded(word, seen) for word in container["command"]) == request.command
    values = {each["name"]: expanded(each["value"], seen) for each in container["env"] if "value" in each}
    assert {name: values[name] for name in variables} == variables
    assert container["workingDir"] == str(request.folder)
    assert "args" not in container


@given(hostile)
def test_a_hostile_name_becomes_a_label_or_is_refused(name: str) -> None:
    if not re.search("[a-z0-9]", name.lower(), re.ASCII):
        with pytest.raises(ClusterError, match="none of them is in it"):
            object_name(name, 1000)
        return
    made = object_name(name, 1000)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made)
    assert len(f"{made}-node-0-999-xxxxx") <= 63


def test_names_become_labels() -> None:
    assert object_name("My Run_7", 2) == "my-run-7"
    assert object_name("7B.long", 2) == "job-7b-long"
    with pytest.raises(ClusterError, match="none of them is in it"):
        object_name("---", 2)
    with pytest.raises(ClusterError, match=r"has 60 letters .* 48 are allowed"):
        object_name("a" * 60, 2)


@given(st.one_of(hostile, st.from_regex(r"[+-]?[0-9_.:eEoxXbn]+", fullmatch=True)))
def test_text_stays_text_in_every_version_of_yaml(text: str) -> None:
    written = to_yaml({"key": text})
    assert yaml.safe_load(written) == {"key": text}
    value = written.removeprefix("key: ").rstrip("\n")
    assert value.startswith('"') or re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value)


@given(st.integers(1, 2**50))
def test_a_quantity_is_the_same_size(size: int) -> None:
    number, suffix = re.fullmatch(r"(\d+)([A-Z]?i?)", quantity(size)).groups()  # type: ignore[union-attr]
    base = 1024 if suffix.endswith("i") else 1000
    assert int(number) * base ** ("-KMGT".index(suffix[0]) if suffix else 0) == size


@given(hostile)
def test_dollars_are_written_so_that_nothing_is_replaced(text: str) -> None:
    assert expanded(literal(text), {"X": "changed", "HOME": "changed"}) == text
