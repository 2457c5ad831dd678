"""The process that compiles grammars."""

from collections.abc import Mapping
from typing import Any

from reference_server.errors import RequestError
from reference_server.grammars.compile import compile_grammar
from reference_server.workers import Job, serve_jobs


def make_job(_: Mapping[str, Any]) -> Job:
    """A job `[kind, text]` -> `{"type": ..., "text": ...}`, or `{"error_type": ..., "detail": ...}` if refused."""
    # The first compilation builds tables; no client should wait for them.
    compile_grammar("schema", '{"properties": {}}')
    return compile_job


def compile_job(job: tuple[str, str]) -> dict[str, str]:
    kind, text = job
    try:
        compiled = compile_grammar(kind, text)
    except RequestError as refusal:
        return {"error_type": refusal.error_type, "detail": refusal.detail}
    return {"type": compiled.type, "text": compiled.text}


if __name__ == "__main__":
    serve_jobs(make_job, ())
