"""Submit a job to a cluster, and show its output."""

import sys
from pathlib import Path
from typing import Any

from drivetrain_clusters.jobs.submitter import describe, follow_job, how_to_go_on, submit_job
from drivetrain_clusters.registry import make_cluster
from drivetrain_config import environ, flags
from drivetrain_launcher.cli.commands.launch import file_notes, resolve_said
from drivetrain_launcher.cli.preflight import check_module, check_plugins_of, misplaced_flags
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.settings import LaunchSettings
from drivetrain_launcher.submit.job_planner import plan_job
from drivetrain_launcher.submit.named_values import read_variables
from drivetrain_launcher.submit.submit_arguments import SubmitArguments
from drivetrain_messages import say, suggest


def run(arguments: SubmitArguments) -> int:
    """Submit a job to a cluster, and show its output until it ends."""
    cluster = make_cluster(arguments.on)
    settings = resolve_said(arguments.layers)
    folder = _folder(arguments.folder)
    _check_script(arguments, settings, folder)
    variables = read_variables(arguments.env, environ.read)
    job = plan_job(arguments, settings, variables, folder=folder)
    submission = cluster.plan(job.request)
    for note in (*file_notes(arguments.layers), *job.notes):
        say(note)
    if arguments.dry_run:
        sys.stdout.write(describe(submission))
        return 0
    for note in submission.notes:
        say(note)
    record = submit_job(cluster, arguments.on, submission)
    if arguments.follow:
        return follow_job(cluster, record, submission)
    sys.stdout.write(f"{record.job_id}\n")
    say(f"follow or cancel it:\n{how_to_go_on(record)}")
    return 0


def _folder(folder: Path) -> Path:
    """Return the working directory of the job as an absolute path, which may exist on the cluster alone."""
    if folder.is_dir():
        return folder.absolute()
    if folder.is_absolute() and not folder.exists():
        return folder
    what = "is not a folder" if folder.exists() else "does not exist here"
    raise LaunchError(
        f"--folder {folder}: {what}; a folder that only the nodes have is named from its root, /..."
    )


def _check_script(arguments: SubmitArguments, settings: dict[str, Any], folder: Path) -> None:
    """Reject a script that is not there and unknown plug-ins, and report launcher flags that follow the script."""
    launch: LaunchSettings = settings["launch"]
    source = None
    if launch.module and folder.is_dir():
        check_module(arguments.script, folder)
    if not launch.module and not launch.program and folder.is_dir():
        source = _source(folder / arguments.script)
    check_plugins_of(arguments.layers, settings, source)
    known = {flag.name for flag in (*flags(LaunchSettings, "launch"), *flags(SubmitArguments, "launch"))}
    if misplaced := misplaced_flags(arguments.arguments, known - {"--script", "--arguments"}, source or ""):
        say(
            f"{', '.join(misplaced)} after {arguments.script} is for the script; put flags of submit and launch "
            f"before the script: drivetrain submit --on {arguments.on} [flags] {arguments.script}"
        )


def _source(script: Path) -> str:
    """Return the source of the script.

    Raises:
        LaunchError: The job's folder is here, but has no such script.
    """
    if script.is_file():
        return script.read_text(encoding="utf-8", errors="replace")
    beside = [each.name for each in script.parent.iterdir()] if script.parent.is_dir() else []
    hint = suggest(script.name, beside, show=script.with_name)
    raise LaunchError(
        f"{script}: no such script{hint}; if only the nodes have it, name their folder with --folder /PATH"
    )
