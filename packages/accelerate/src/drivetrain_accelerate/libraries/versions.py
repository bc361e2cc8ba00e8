"""Compare versions of libraries."""

from importlib.metadata import version as installed_version

from packaging.version import Version, parse

from drivetrain_accelerate.plugins.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a version fulfils a requirement.

    Args:
        library_or_version: The name of an installed library, or a version.
        operation: The comparison, one of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: The version to compare with.

    Raises:
        ValueError: The operation is unknown, or the required version is none.
        PackageNotFoundError: The library is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation={operation!r}: say one of {', '.join(STR_OPERATION_TO_FUNC)}")
    if isinstance(library_or_version, str):
        library_or_version = parse(installed_version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's release, without what a build adds such as +cu128, fulfils a requirement."""
    import torch

    release = parse(parse(str(torch.__version__)).base_version)
    return compare_versions(release, operation, version)
