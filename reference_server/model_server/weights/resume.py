"""Downloads a file of the hub into the cache's blobs, resumes a broken download, and checks its digest.

huggingface_hub resumes only within one call and compares sizes only; a partial file here survives the process, except
for the last incomplete chunk of 10 MB.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from reference_server.errors import StartupError

logger = logging.getLogger(__name__)

PARTIAL = ".incomplete"
_CHUNK_BYTES = 1 << 20
# The hub's tags: SHA-256 of a large file, git's own hash of a small one.
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


def fetch_blob(library: Any, url: str, blobs: Path, token: str | None) -> None:
    """Download `url` to `blobs`/ETAG, where huggingface_hub finds it.

    huggingface_hub downloads files without a digest, and those of hf_xet, which checks its chunks.
    Raises StartupError if the disk is too small, OSError if the digest is wrong.
    """
    from huggingface_hub.file_download import http_get, is_xet_available
    from huggingface_hub.utils import build_hf_headers

    facts = library.get_hf_file_metadata(url, token=token)
    etag, size = facts.etag or "", facts.size
    blob = blobs / etag
    by_xet = facts.xet_file_data is not None and is_xet_available()
    if by_xet or size is None or not _DIGEST.fullmatch(etag) or blob.exists():
        return
    blobs.mkdir(parents=True, exist_ok=True)
    with (blobs / f"{etag}{PARTIAL}").open("a+b") as file:
        # Processes that waited for the lock find the blob, or resume the partial file.
        fcntl.flock(file, fcntl.LOCK_EX)
        if blob.exists():
            return
        done = _resume_size(file, size)
        _check_space(blobs, size - done)
        if done:
            logger.info("Resuming after %d of %d bytes", done, size)
        http_get(url, file, resume_size=done, headers=build_hf_headers(token=token), expected_size=size)
        file.flush()
        if _digest(file, etag, size) != etag:
            file.truncate(0)
            raise OSError(f"the downloaded file is wrong: its digest is not {etag}")
        Path(file.name).replace(blob)


def _resume_size(file: BinaryIO, size: int) -> int:
    done = file.seek(0, os.SEEK_END)
    if done <= size:
        return done
    file.truncate(0)
    return 0


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StartupError(f"{needed} bytes are to be downloaded, and {directory} has {free} bytes free")


def _digest(file: BinaryIO, etag: str, size: int) -> str:
    digest = hashlib.sha256() if len(etag) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
