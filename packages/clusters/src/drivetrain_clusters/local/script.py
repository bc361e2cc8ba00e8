"""The script of a job on this machine: the script repeats the command after a save, and records the exit code."""

import shlex

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import RESUME_EXIT_CODE, JobRequest, Submission
from drivetrain_clusters.request_values import check_request, file_stem, launch_variables
from drivetrain_clusters.system_command import in_this_python

JOB_VARIABLE = "DRIVETRAIN_LOCAL_JOB_ID"
RESTARTS_VARIABLE = "DRIVETRAIN_LOCAL_JOB_RESTARTS"

# The job's id is the process id of its shell. SIGTERM ends it: the command saves, and is not started again.
SCRIPT_BEGIN = "#!/bin/sh\n# Written by drivetrain submit.\n"
_SCRIPT = """cd {folder} || exit 1
exec >>{stem}-$$.out 2>&1
{exports}
export {job}=$$
restarts=0 stopped=
trap 'stopped=yes; kill -TERM "$child" 2>/dev/null' TERM INT
while :; do
    export {restarts}=$restarts
    {command} &
    child=$!
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    if [ "$code" != {resume} ] || [ -n "$stopped" ] || [ "$restarts" -ge {most} ]; then break; fi
    restarts=$((restarts + 1))
done
echo "$code" >{stem}-$$.code.part && mv {stem}-$$.code.part {stem}-$$.code
exit "$code"
"""


def plan_local(request: JobRequest) -> Submission:
    """Return the script of a job on this machine, and the command that starts it in the background."""
    check_request("local", request)
    if request.num_nodes != 1:
        raise ClusterError(f"local: num_nodes={request.num_nodes}: this machine is one node; leave it out")
    for what in ("cpus_per_node", "memory_per_node", "options"):
        if value := getattr(request, what):
            shown = ", ".join(value) if what == "options" else value
            raise ClusterError(
                f"local: {what}={shown}: this machine is not divided between jobs; leave it out"
            )
    limit: tuple[str, ...] = ()
    if request.time_limit_seconds is not None:
        seconds = request.time_limit_seconds - request.save_seconds
        kill_after = f"--kill-after={request.save_seconds}"
        limit = ("timeout", "--foreground", "--preserve-status", kill_after, str(seconds))
    slug = file_stem(request)
    folder = request.log_dir.absolute()  # the job runs in another one
    path = folder / f"{slug}.sh"
    script = SCRIPT_BEGIN + _SCRIPT.format(
        folder=shlex.quote(str(request.folder.absolute())),
        stem=shlex.quote(str(folder / slug)),
        exports="\n".join(f"export {n}={shlex.quote(text)}" for n, text in launch_variables(request).items()),
        job=JOB_VARIABLE,
        restarts=RESTARTS_VARIABLE,
        command=shlex.join((*limit, *in_this_python(request.command))),
        most=request.max_requeues,
        resume=RESUME_EXIT_CODE,
    )
    in_background = 'nohup sh "$1" >/dev/null 2>&1 </dev/null & echo $!'
    return Submission(
        files={path: script},
        command=("sh", "-c", in_background, "drivetrain", str(path)),
        request=request,
    )
