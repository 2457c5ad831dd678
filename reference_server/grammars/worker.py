"""The process that compiles grammars. reliability.md Q11."""

from collections.abc import Mapping
from typing import Any

from reference_server.errors import RequestError
from reference_server.grammars.compile import compile_grammar
from reference_server.workers import Job, serve_jobs


def make_job(_: Mapping[str, Any]) -> Job:
    """The compilation of `[kind, text]`: `{"regex": ...}`, or `{"error_type": ..., "detail": ...}` of a refusal."""
    # The first one sets up tables that no client should wait for.
    compile_grammar("object", "")
    return compile_job


def compile_job(job: tuple[str, str]) -> dict[str, str]:
    kind, text = job
    try:
        return {"regex": compile_grammar(kind, text)}
    except RequestError as refusal:
        return {"error_type": refusal.error_type, "detail": refusal.detail}


if __name__ == "__main__":
    serve_jobs(make_job, ())
