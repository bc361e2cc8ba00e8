"""Verify every block of a checkpoint, and report damage."""

import sys

from drivetrain_checkpoint.cli.arguments import VerifyArguments
from drivetrain_checkpoint.cli.given_places import WRONG, checkpoint_of, directory_of, place_of, report_errors
from drivetrain_checkpoint.cli.printing import Progress
from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.format.layout import has_manifest, step_of
from drivetrain_checkpoint.format.manifest import read_manifest
from drivetrain_checkpoint.loading.discovery import find_checkpoints
from drivetrain_checkpoint.loading.verify import verify_checkpoint
from drivetrain_checkpoint.storage.place import Place
from drivetrain_messages import format_count, format_size


@report_errors
def run(arguments: VerifyArguments) -> int:
    """Check every block of a checkpoint, or of all checkpoints in a folder; return 1 if any block is damaged."""
    place = place_of(arguments.folder)
    if has_manifest(place) or step_of(place) is not None:
        return 0 if _verify(checkpoint_of(arguments.folder)) else WRONG
    found = find_checkpoints(directory_of(arguments.folder))
    for one in found:
        if not one.committed:
            sys.stdout.write(f"{one.folder.name}: not completed, so no checkpoint; nothing to verify\n")
    are_good = [_verify(one.folder) for one in found if one.committed]  # a list, so that all are verified
    return 0 if all(are_good) else WRONG


def _verify(folder: Place) -> bool:
    """Verify one checkpoint, print all damage, and return whether it is intact."""
    try:
        manifest = read_manifest(folder)
    except CorruptCheckpointError as error:
        sys.stdout.write(f"{folder.name}: not valid: {error}\n")
        return False
    with Progress(f"verify {folder.name}", manifest.size_bytes) as progress:
        damaged = verify_checkpoint(folder, on_bytes=progress.advance)
    for damage in damaged:
        sys.stdout.write(f"{damage}\n")
    good = f"good: {format_count(len(manifest.files), 'file')}, {format_size(manifest.size_bytes)}"
    verdict = f"damaged in {format_count(len(damaged), 'place')}" if damaged else good
    sys.stdout.write(f"{folder.name}: {verdict}\n")
    return not damaged
