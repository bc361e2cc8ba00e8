"""Call functions of S3 that fsspec lacks, through s3fs: check that a bucket exists, and abort incomplete uploads."""

import logging
from typing import Any

logger = logging.getLogger(__name__)


def is_s3(fs: Any) -> bool:
    """Return whether a file system is from s3fs, which gives access to S3's own API."""
    return hasattr(fs, "call_s3")


def check_bucket(fs: Any, path: str) -> None:
    """Check that the bucket of a path exists, to tell a missing bucket from an empty prefix."""
    bucket, _, _ = fs.split_path(path)
    fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)


def abort_uploads(fs: Any, path: str) -> None:
    """Abort every upload below a prefix: the parts left by a killed process would stay, invisible and billed.

    Raises:
        FileNotFoundError: The bucket does not exist.
    """
    bucket, prefix, _ = fs.split_path(path)
    try:
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
    except FileNotFoundError:
        raise
    except OSError as error:  # this call needs further permissions, and not every store has it
        logger.info("parts of uploads below s3://%s are not looked for: %s", path, error)
