import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_clusters import ClusterError
from drivetrain_clusters.ray.job import RayJob, plan_ray
from requests_of_jobs import TRAPS, hostile, make_request


@settings(max_examples=50)
@given(st.lists(hostile, max_size=6), st.dictionaries(st.sampled_from("ABCD"), hostile), hostile)
def test_a_hostile_job_reaches_its_driver_as_it_is(
    words: list[str], variables: dict[str, str], name: str
) -> None:
    request = make_request(name=name, command=("drivetrain", "launch", *words), environment=variables)
    planned = plan_ray(request)
    text = planned.encode()
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", text)
    assert RayJob.decode(text) == planned
    assert planned.request == request
    assert planned.entrypoint == "python -m drivetrain_clusters.ray.driver"


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if not re.fullmatch(r"[A-Za-z0-9_]+", trap)])
def test_the_path_of_python_that_a_shell_reads_has_no_signs(trap: str) -> None:
    with pytest.raises(ClusterError, match="must be a path of Python without spaces"):
        plan_ray(make_request(options={"python": trap if not re.fullmatch("[0-9-]+", trap) else f"{trap} x"}))


def test_resources_have_rays_names() -> None:
    request = make_request(
        cpus_per_node=8, memory_per_node="2KiB", accelerators_per_node=4, options={"accelerator": "TPU"}
    )
    assert plan_ray(request).bundle == {"CPU": 8, "memory": 2048, "TPU": 4}
    assert plan_ray(make_request()).bundle == {"CPU": 1}


def test_a_folder_is_shared_or_copied() -> None:
    assert plan_ray(make_request()).upload is False
    assert plan_ray(make_request(options={"upload": "true"})).upload is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adress": "x"}, "ray has no such option; did you mean address"),
        ({"address": "head:8265"}, "must be the address of Ray's dashboard, http://HOST:8265"),
        ({"strategy": "WIDE"}, "must be auto, STRICT_SPREAD, SPREAD, PACK or STRICT_PACK"),
        ({"upload": "x"}, "say true or false"),
        ({"wait-seconds": "0"}, "must be a number from 1"),
        ({"accelerator": "a b"}, "must be the name of a resource of Ray"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        plan_ray(make_request(options=options))


def test_a_job_that_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(ClusterError, match="put long arguments into a file"):
        plan_ray(make_request(command=("drivetrain", "launch", "x" * 200_000)))


@pytest.mark.parametrize("text", ["", "x", "e30=", "////"])
def test_a_text_that_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="DRIVETRAIN_RAY_JOB cannot be read"):
        RayJob.decode(text)
