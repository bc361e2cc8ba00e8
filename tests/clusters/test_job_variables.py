import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, job_port, visible_devices

JOBS = st.integers(1, 2**31)


@given(JOBS, st.integers(1, 1490), st.integers(0, 12), st.integers(0, 12))
def test_steps_of_jobs_of_one_time_have_ports_of_their_own(
    job: int, later: int, step: int, other: int
) -> None:
    assert job_port(str(job), step) != job_port(str(job + later), other)


@given(JOBS, st.integers(0, 12), st.integers(0, 12))
def test_steps_of_one_job_have_ports_of_their_own(job: int, step: int, other: int) -> None:
    assert (job_port(str(job), step) == job_port(str(job), other)) == (step == other)


@given(st.text(max_size=20), st.integers(0, 1000))
def test_a_port_is_no_clients_port(job: str, step: int) -> None:
    assert 10000 <= job_port(job, step) < 29500


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "٣"])
def test_a_value_that_is_no_integer_is_an_error_with_name_and_value(text: str) -> None:
    read = JobVariables("slurm", {"SLURM_NODEID": text, "SLURM_JOB_ID": "1"})
    with pytest.raises(
        ClusterError, match=r"slurm: SLURM_NODEID(='.+': must be an integer| is not set, but SLURM_JOB_ID)"
    ):
        read.integer("SLURM_NODEID")


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, (None, {})),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, (("0", "3"), {"devices": "CUDA_VISIBLE_DEVICES"})),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f1c"}, (("GPU-8f1c",), {"devices": "CUDA_VISIBLE_DEVICES"})),
        ({"CUDA_VISIBLE_DEVICES": ""}, ((), {"devices": "CUDA_VISIBLE_DEVICES"})),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ((), {"devices": "CUDA_VISIBLE_DEVICES"})),
        ({"ROCR_VISIBLE_DEVICES": "1"}, (("1",), {"devices": "ROCR_VISIBLE_DEVICES"})),
    ],
)
def test_bound_accelerators_are_read(environment: dict[str, str], devices: object) -> None:
    assert visible_devices(environment) == devices
