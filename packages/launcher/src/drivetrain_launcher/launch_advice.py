"""The questions of `drivetrain config` about the launch, with recommended answers."""

from drivetrain_config.settings.advice import Advice, Known


def ask_num_nodes(known: Known) -> Advice | None:
    """Ask for the number of machines, unless a cluster has decided it."""
    if known.get("cluster.num_nodes") is not None:
        return None
    return {
        "value": 1,
        "why": "a single machine needs no rendezvous",
        "text": "How many machines train together?",
    }


def ask_num_processes(known: Known) -> Advice | None:
    """Ask for the number of processes of a single machine, unless the machine has exactly one accelerator."""
    count, kind = known["machine.accelerator_count"], known["machine.accelerator"]
    if _num_nodes(known) > 1 or count == 1:
        return None
    if count == 0:
        cores = known["machine.num_cpus"]
        return {
            "value": 1,
            "why": f"without an accelerator, one process already computes on all {cores} cores"
            if cores > 1
            else "there is one core and no accelerator",
            "text": "How many processes train on this machine?",
            "after": ("launch.num_nodes",),
        }
    fewer = [number for number in (8, 4, 2, 1) if number < count]
    return {
        "value": None,
        "why": f"a file that leaves the number open suits machines with more or fewer than {count} devices too",
        "text": "How many processes train on this machine?",
        "choices": {
            None: f"one for each {kind} device, here {count}",
            **dict.fromkeys(fewer, "on the first devices"),
        },
        "after": ("launch.num_nodes",),
    }


def ask_rdzv_backend(known: Known) -> Advice | None:
    """Ask how several machines find their ranks."""
    if not _needs_meeting(known):
        return None
    return {
        "value": "static",
        "why": "the machines are fixed, and each launch says which it is: --node-rank 0, 1, ...",
        "text": "How do the machines agree on their ranks?",
        "choices": {
            "static": "each launch is told its --node-rank",
            "c10d": "they agree among themselves, and can restart together",
        },
    }


def ask_master_addr(known: Known) -> Advice | None:
    """Ask where several machines meet."""
    if not _needs_meeting(known):
        return None
    return {
        "value": known["machine.host"],
        "why": "the name of this machine, if it is the first one and the others resolve it",
        "text": "Name or address of the first machine, where all meet?",
    }


def ask_rdzv_id(known: Known) -> Advice | None:
    """Ask for the name of a run whose machines agree on their ranks."""
    if not _needs_meeting(known) or known.get("launch.rdzv_backend") == "static":
        return None
    return {
        "value": known["machine.folder"],
        "why": "the name of this folder; two runs at the same time need two names",
        "text": "Name of the run, the same on all machines?",
    }


def _num_nodes(known: Known) -> int:
    return known.get("cluster.num_nodes") or known.get("launch.num_nodes") or 1


def _needs_meeting(known: Known) -> bool:
    return known.get("cluster.num_nodes") is None and _num_nodes(known) > 1
