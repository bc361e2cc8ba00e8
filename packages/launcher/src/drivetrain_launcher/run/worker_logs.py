"""The error files and the outputs of the ranks, as torch's agent asks for them."""

from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.keeper.rank_streams import RankStreams


class WorkerLogs(DefaultLogsSpecs):
    """The error files of the ranks, and their output files if the plan has a log folder."""

    def __init__(self, plan: LaunchPlan, scratch: Path, streams: RankStreams) -> None:
        super().__init__(
            log_dir=str(plan.log_dir or scratch), redirects=Std.ALL if plan.log_dir is not None else Std.NONE
        )
        self.error_files: dict[int, Path] = {}
        self._streams = streams

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Assign the files of all ranks; the agent calls this each time it starts the ranks."""
        destinations = super().reify(envs)
        self.error_files = {rank: Path(file) for rank, file in destinations.error_files.items()}
        self._streams.begin_attempt(f"TORCHELASTIC_ERROR_FILE={self.error_files[0].parents[1]}")
        for local_rank, variables in envs.items():
            files = {1: destinations.stdouts[local_rank], 2: destinations.stderrs[local_rank]}
            opened = self._streams.open(int(variables["RANK"]), files)
            destinations.stdouts[local_rank], destinations.stderrs[local_rank] = opened
        return destinations
