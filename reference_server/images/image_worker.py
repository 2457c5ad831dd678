"""The worker process that decodes images of requests: it finds their sizes and refuses those that do not decode."""

import base64
from collections.abc import Mapping
from typing import Any

from reference_server.images.decode import ImageError, decode
from reference_server.workers import Job, serve_jobs


def make_job(_: Mapping[str, Any]) -> Job:
    """The function from an image in base64 to its height and width."""
    # Imports Pillow and the decoders' libraries, before a request waits for them.
    import PIL.Image

    PIL.Image.init()

    def measure(data: str) -> tuple[int, int]:
        width, height = decode(base64.b64decode(data)).size
        return height, width

    return measure


if __name__ == "__main__":
    serve_jobs(make_job, (ImageError, ImportError))
