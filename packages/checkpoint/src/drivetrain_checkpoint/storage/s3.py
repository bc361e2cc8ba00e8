"""What S3 offers that fsspec does not, by s3fs: whether a bucket exists, and uploads that nobody will finish."""

import logging
from typing import Any

logger = logging.getLogger(__name__)


def is_s3(fs: Any) -> bool:
    """Whether a file system is s3fs's, which lets one call S3 itself."""
    return hasattr(fs, "call_s3")


def check_bucket(fs: Any, path: str) -> None:
    """Tell a bucket that does not exist from a prefix below which there is nothing.

    Raises:
        FileNotFoundError: There is no such bucket.
    """
    bucket, _, _ = fs.split_path(path)
    fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)


def abort_uploads(fs: Any, path: str) -> None:
    """Give up every upload below a prefix: parts that a killed process left would stay, unseen and paid for.

    Raises:
        FileNotFoundError: There is no such bucket.
    """
    bucket, prefix, _ = fs.split_path(path)
    try:
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", ()):
            fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
    except FileNotFoundError:
        raise
    except OSError as error:  # tidying up wants permissions of its own, and not every store has this call
        logger.info("parts of uploads below s3://%s are not looked for: %s", path, error)
