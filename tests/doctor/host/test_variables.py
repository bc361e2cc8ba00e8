import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.host.variables import VariableMeasurement, judge_variables, unmatched

TWO = CheckedRun(num_nodes=2, node_rank=0, master_addr="node0.cluster.local")


def whats(
    checked: CheckedRun = TWO, num_gpus: int | None = None, **environment: str
) -> list[tuple[str, str]]:
    measured = VariableMeasurement(
        environment=environment, interfaces=("lo", "eth0", "ib0"), cores=8, num_gpus=num_gpus
    )
    return [(finding.severity, finding.what) for finding in judge_variables(measured, checked).findings]


def test_an_empty_environment_has_no_finding() -> None:
    assert whats() == []


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there(name: str) -> None:
    what = f"{name}=enp3s0 names no interface of this host, which has lo, eth0, ib0"
    assert whats(**{name: "enp3s0"}) == [("error", what)]
    assert whats(**{name: "eth0"}) == []


@pytest.mark.parametrize(
    ("value", "is_unmatched"),
    [("eth", False), ("=eth", True), ("=eth0", False), ("^eth", False), ("^eth,ib", True), ("^=eth0,ib0", True),
     ("^docker", False), ("enp,ib", False), ("=eth0:1", False)],
)  # fmt: skip
def test_nccls_lists_of_interfaces(value: str, is_unmatched: bool) -> None:
    assert unmatched(value, ("lo", "eth0", "ib0")) is is_unmatched


@given(
    names=st.lists(st.text("abc0", min_size=1, max_size=4), min_size=1, unique=True), index=st.integers(0, 9)
)
def test_each_interface_matches_its_own_name(names: list[str], index: int) -> None:
    name = names[index % len(names)]
    assert not unmatched(name, tuple(names))
    assert not unmatched(f"={name}", tuple(names))
    assert unmatched(f"^{','.join(names)}", tuple(names))


def test_the_loopback_interface_leads_to_no_other_host() -> None:
    assert whats(GLOO_SOCKET_IFNAME="lo") == [("error", "GLOO_SOCKET_IFNAME=lo with 2 hosts")]
    assert whats(CheckedRun(processes_per_node=2), GLOO_SOCKET_IFNAME="lo") == []


def test_too_many_threads() -> None:
    four = CheckedRun(processes_per_node=4)
    assert whats(four, OMP_NUM_THREADS="8") == [
        ("warning", "OMP_NUM_THREADS=8 in each of 4 ranks, on 8 cores")
    ]
    assert whats(four, OMP_NUM_THREADS="2,1") == []
    assert whats(four, OMP_NUM_THREADS="all") == []  # OpenMP itself says so


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("", ("warning", "CUDA_VISIBLE_DEVICES='' hides all of this host's 4 GPUs")),
        ("-1", ("warning", "CUDA_VISIBLE_DEVICES='-1' hides all of this host's 4 GPUs")),
        ("0,4", ("error", "CUDA_VISIBLE_DEVICES=0,4 names GPU 4, of 4")),
        ("1,1", ("error", "CUDA_VISIBLE_DEVICES=1,1 names a GPU twice")),
    ],
)
def test_visible_devices(value: str, found: tuple[str, str]) -> None:
    two = CheckedRun(processes_per_node=2)
    assert whats(two, 4, CUDA_VISIBLE_DEVICES=value) == [found]
    assert whats(two, None, CUDA_VISIBLE_DEVICES=value) == []  # no GPU here
    assert whats(two, 4, CUDA_VISIBLE_DEVICES="GPU-1,GPU-2") == []


def test_a_proxy_between_hosts() -> None:
    proxy = {"http_proxy": "http://proxy:3128"}
    assert whats(**proxy) == [("warning", "http_proxy set, but no_proxy does not name node0.cluster.local")]
    assert whats(**proxy, no_proxy="localhost,.cluster.local") == []
    assert whats(**proxy, NO_PROXY="*") == []
    assert whats(CheckedRun(), **proxy) == []


def test_ranks_left_in_the_shell_by_another_launcher() -> None:
    (found,) = whats(CheckedRun(), RANK="3", WORLD_SIZE="4")
    assert found == ("warning", "RANK=3, WORLD_SIZE=4 set in the shell")
    assert whats(RANK="3", WORLD_SIZE="4") == []


def test_variables_that_slow_a_run_are_named_with_their_values() -> None:
    found = whats(
        CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1", TORCH_DISTRIBUTED_DEBUG="detail", NCCL_DEBUG="INFO"
    )
    assert found == [
        ("warning", "CUDA_LAUNCH_BLOCKING=1"),
        ("warning", "NCCL_P2P_DISABLE=1"),
        ("warning", "TORCH_DISTRIBUTED_DEBUG=detail"),
    ]
