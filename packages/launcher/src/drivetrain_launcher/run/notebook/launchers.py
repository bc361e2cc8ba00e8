"""Launch a function on several processes, from a notebook or to test a training loop on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

from drivetrain_config import environ
from drivetrain_launcher.run.notebook.accelerate_arguments import read_port
from drivetrain_launcher.run.notebook.rank_pool_plan import RankPoolPlan, plan_rank_pool


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    mixed_precision: str | None = None,
    master_port: int = 0,
    **accelerate: object,
) -> list[Any]:
    """Run a function on several processes of this machine, from a notebook or an interpreter.

    The processes are fresh interpreters, which share no state with this one. The function, its arguments and what it
    uses are shipped to them; modules are imported there. Their output appears in the calling cell. `Workers` keeps
    the processes for the next call.

    Args:
        function: The function, called as `function(*args)` on each process.
        args: The arguments of the function.
        num_processes: The number of processes; None for one per accelerator, or one if there is none. A single
            process is the caller's.
        mixed_precision: The `run.mixed_precision` setting of the processes, which their code may override.
        master_port: The port of the rendezvous; 0 for any free port.
        **accelerate: The other arguments of Accelerate's notebook_launcher. `use_port` is `master_port`; another
            argument is refused if it asks for different behaviour.

    Returns:
        The return values of the function, in rank order.

    Raises:
        LaunchError: If there are fewer accelerators than processes, a part of the function or of an argument cannot
            be shipped, an argument is refused, or `num_processes` is not an integer of at least 1.
        RankFailedError: If a rank fails; the message shows its traceback.
        KeyboardInterrupt: If the call is interrupted. The ranks got KeyboardInterrupt too, and 30 s to save.
        TypeError: If an argument is unknown.
    """
    port = read_port(accelerate, master_port=master_port)
    plan = plan_rank_pool(num_processes, mixed_precision=mixed_precision, master_port=port)
    if plan.num_processes == 1:
        with environ.exported(**plan.variables):
            return [function(*args)]
    return _run_once(plan, function, args)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Run a function on several CPU processes, to test that it works on more than one.

    The arguments, the return values and the errors are those of `notebook_launcher`.
    """
    return _run_once(plan_rank_pool(num_processes, cpu=True), function, args)


def _run_once(plan: RankPoolPlan, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    from drivetrain_launcher.run.notebook.pickled_call import pack
    from drivetrain_launcher.run.notebook.rank_pool import RankPool

    pickled_call = pack(function, args)
    pool = RankPool(plan)
    try:
        with pickled_call.content:
            results = pool.call(pickled_call)
        pool.end()
        return results
    finally:
        pool.kill()
