"""Submit a job to a cluster, and show its output."""

import sys
from pathlib import Path

from drivetrain_clusters.jobs.submitter import follow_job, how_to_go_on, submit_job
from drivetrain_clusters.registry import make_cluster
from drivetrain_config import environ, flags
from drivetrain_launcher.cli.preflight import check_given, check_module, check_script, report_misplaced
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.resolved_launch import ResolvedLaunch, resolve_launch
from drivetrain_launcher.settings import LaunchSettings
from drivetrain_launcher.submit.job_planner import plan_job
from drivetrain_launcher.submit.named_values import read_variables
from drivetrain_launcher.submit.submit_arguments import SubmitArguments
from drivetrain_messages import say

TOPIC = "Run"  # in `drivetrain --help`


def run(arguments: SubmitArguments) -> int:
    """Submit a job to a cluster, and show its output until it ends."""
    cluster = make_cluster(arguments.on)
    resolved = resolve_launch(arguments.layers)
    folder = arguments.folder
    if folder.is_dir():
        folder = folder.absolute()
    elif folder.exists() or not folder.is_absolute():  # the cluster alone may have it
        what = "is not a folder" if folder.exists() else "does not exist here"
        raise LaunchError(
            f"--folder {folder}: {what}; a folder that only the nodes have is named from its root, /..."
        )
    _check_script(arguments, resolved, folder)
    variables = read_variables(arguments.env, environ.read)
    job = plan_job(arguments, resolved, variables, folder=folder)
    submission = cluster.plan(job.request)
    for note in (*resolved.file_notes, *job.notes):
        say(note)
    if arguments.dry_run:
        sys.stdout.write(f"{submission}\n")
        return 0
    for note in submission.notes:
        say(note)
    record = submit_job(cluster, arguments.on, submission)
    if arguments.follow:
        return follow_job(cluster, record, submission)
    sys.stdout.write(f"{record.job_id}\n")
    say(f"follow or cancel it:\n{how_to_go_on(record)}")
    return 0


def _check_script(arguments: SubmitArguments, resolved: ResolvedLaunch, folder: Path) -> None:
    """Reject a missing script and unknown plug-ins, and report launcher flags that follow the script."""
    kind, source = resolved.launch.target_kind, None
    if folder.is_dir() and kind == "module":
        check_module(arguments.script, folder)
    elif folder.is_dir() and kind == "script":
        script = folder / arguments.script
        check_script(script, remedy="; if only the nodes have it, name their folder with --folder /PATH")
        source = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else None
    known = {flag.name for flag in (*flags(LaunchSettings, "launch"), *flags(SubmitArguments, "launch"))}
    target = LaunchTarget(name=arguments.script, arguments=arguments.arguments, kind=kind)
    report_misplaced(
        target, known - {"--script", "--arguments"}, source, command=f"submit --on {arguments.on}"
    )
    check_given(resolved.given, source)
