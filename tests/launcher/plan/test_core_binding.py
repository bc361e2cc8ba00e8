"""The cores of each rank: its own, near its device, all of them used."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_launcher import Host, LaunchPlan, LaunchSettings, LaunchTarget, plan_launch
from drivetrain_launcher.plan.core_binding import CoreBinding, plan_bindings, unused_cores
from drivetrain_launcher.plan.host_detection import Core, CpuTopology

TARGET = LaunchTarget(name="train.py")


def machine(*cores_of_nodes: int, device_nodes: Sequence[int | None] = (), threads: int = 2) -> CpuTopology:
    """Return a machine whose NUMA nodes have these numbers of cores; hyperthreads are numbered behind all cores."""
    nodes = [node for node, count in enumerate(cores_of_nodes) for _ in range(count)]
    return CpuTopology(
        cores=tuple(
            Core(cpus=tuple(core + len(nodes) * thread for thread in range(threads)), numa_node=node)
            for core, node in enumerate(nodes)
        ),
        device_nodes=tuple(device_nodes),
    )


def test_each_rank_is_near_its_device_with_cores_of_its_own() -> None:
    bindings = plan_bindings(machine(4, 4, device_nodes=(1, 1, 0, 0)), 4)
    assert [binding.cpus for binding in bindings] == [
        (4, 5, 12, 13),
        (6, 7, 14, 15),
        (0, 1, 8, 9),
        (2, 3, 10, 11),
    ]
    assert all(binding.is_near_device and binding.num_cores == 2 for binding in bindings)
    assert str(bindings[0]) == "CPUs 4-5,12-13 (2 cores of NUMA node 1, that of its device)"


def test_ranks_on_the_cpu_divide_the_nodes() -> None:
    bindings = plan_bindings(machine(4, 4), 2)
    assert [binding.numa_nodes for binding in bindings] == [(0,), (1,)]
    assert [binding.num_cores for binding in bindings] == [4, 4]
    assert not any(binding.is_near_device for binding in bindings)


def test_fewer_ranks_than_nodes_take_whole_nodes() -> None:
    assert [binding.numa_nodes for binding in plan_bindings(machine(2, 2, 2, 2), 2)] == [(0, 1), (2, 3)]
    assert plan_bindings(machine(2, 2), 1)[0].cpus == tuple(range(8))


def test_the_larger_node_gets_more_of_the_ranks() -> None:
    assert [binding.numa_nodes for binding in plan_bindings(machine(6, 2), 4)] == [(0,), (0,), (0,), (1,)]


def test_a_device_whose_node_has_no_usable_core_goes_where_most_are_free() -> None:
    bindings = plan_bindings(machine(4, 4, device_nodes=(0, 0, 7, None)), 4)
    assert [binding.is_near_device for binding in bindings] == [True, True, False, False]
    assert [binding.numa_nodes for binding in bindings] == [(0,), (0,), (1,), (1,)]


def test_more_ranks_than_cores_share_them() -> None:
    assert [binding.cpus for binding in plan_bindings(machine(2, threads=1), 4)] == [(0,), (0,), (1,), (1,)]


def test_cores_of_a_node_without_a_device_are_told() -> None:
    topology = machine(2, 3, device_nodes=(0, 0))
    assert unused_cores(topology, plan_bindings(topology, 2)) == {1: 3}
    assert unused_cores(machine(2, 3), plan_bindings(machine(2, 3), 2)) == {}


@given(
    cores=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    num_ranks=st.integers(1, 16),
    threads=st.integers(1, 2),
    data=st.data(),
)
def test_no_core_is_left_or_shared_where_there_are_enough(
    cores: list[int], num_ranks: int, threads: int, data: st.DataObject
) -> None:
    node = st.none() | st.integers(0, len(cores) - 1)
    known = data.draw(st.booleans())
    devices = data.draw(st.lists(node, min_size=num_ranks, max_size=num_ranks)) if known else ()
    topology = machine(*cores, device_nodes=devices, threads=threads)
    bindings = plan_bindings(topology, num_ranks)
    assert len(bindings) == num_ranks
    used = [cpu for binding in bindings for cpu in binding.cpus]
    for rank, device_node in enumerate(devices):
        if device_node is not None:
            assert bindings[rank].numa_nodes == (device_node,)
    ranks_of = {
        node: sum(binding.numa_nodes == (node,) for binding in bindings) for node in range(len(cores))
    }
    if all(ranks_of[node] <= cores[node] for node in ranks_of):
        assert len(used) == len(set(used))  # nobody shares
    if all(device is None for device in devices) and num_ranks <= sum(cores):
        assert unused_cores(topology, bindings) == {}
    assert all(binding.num_cores * threads == len(binding.cpus) for binding in bindings)


def plan(settings: LaunchSettings, topology: CpuTopology, **host: object) -> LaunchPlan:
    """Return the plan of a launch on a machine."""
    return plan_launch(settings, TARGET, Host(cpu_topology=topology, **host))  # pyright: ignore[reportArgumentType]


def test_a_plan_shows_the_cores_of_each_rank_and_threads_fill_them() -> None:
    planned = plan(LaunchSettings(num_processes=2, bind="auto"), machine(4, 4))
    assert [rank.binding for rank in planned.ranks()] == list(planned.bindings)
    assert planned.environment["OMP_NUM_THREADS"] == "4"
    assert "rank 0: RANK=0 LOCAL_RANK=0 bound to CPUs 0-3,8-11 (4 cores of NUMA node 0)" in str(planned)
    assert any("the fewest cores that one has" in note for note in planned.notes)


def test_threads_that_were_asked_for_stay() -> None:
    topology = machine(4, 4)
    asked = LaunchSettings(num_processes=2, bind="auto", threads_per_process=3)
    assert plan(asked, topology).environment["OMP_NUM_THREADS"] == "3"
    inherited = plan(LaunchSettings(num_processes=2, bind="auto"), topology, omp_num_threads="5")
    assert "OMP_NUM_THREADS" not in inherited.environment


def test_threads_keep_to_the_quota_of_a_container() -> None:
    topology = replace(machine(4, 4), quota=4.5)
    planned = plan(LaunchSettings(num_processes=2, bind="auto"), topology)
    assert planned.environment["OMP_NUM_THREADS"] == "2"
    assert any("quota" in note for note in planned.notes)


def test_what_cannot_be_near_is_said() -> None:
    four = {"accelerator": "cuda", "accelerator_count": 4}
    unknown = plan(LaunchSettings(bind="auto"), machine(4, 4, device_nodes=(None,) * 4), **four)
    assert any("does not tell near which cores" in note for note in unknown.notes)
    lone = plan(LaunchSettings(bind="auto"), machine(4, 3, device_nodes=(0,) * 4), **four)
    assert any("no rank is near NUMA node 1, whose 3 cores" in note for note in lone.notes)
    crowded = plan(LaunchSettings(bind="auto", num_processes=3), machine(2))
    assert any("3 ranks share 2 cores" in note for note in crowded.notes)


def task(topology: CpuTopology) -> LaunchPlan:
    """Return the plan of the second of two tasks of a job, one for each rank."""
    placement = JobPlacement(
        cluster="slurm",
        job_id="7",
        num_nodes=1,
        node_rank=0,
        num_tasks=2,
        tasks_per_node=2,
        task_rank=1,
        local_task=1,
        master_addr="here",
        master_port=29500,
    )
    host = Host(cpu_topology=topology)
    return plan_launch(LaunchSettings(bind="auto"), TARGET, host, placement=placement)


def test_a_task_takes_its_part_of_the_cores_unless_its_cluster_gave_it_one() -> None:
    (rank,) = task(machine(4)).ranks()
    assert rank.binding == CoreBinding(cpus=(2, 3, 6, 7), num_cores=2, numa_nodes=(0,))
    bound = task(CpuTopology(cores=machine(2).cores, is_bound=True))
    assert bound.bindings == ()
    assert any("slurm lets this task use 2 cores of the machine" in note for note in bound.notes)
