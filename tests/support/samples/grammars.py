"""Grammars compiled in this process, by the code that the workers run."""

from typing import Any, cast

from reference_server.grammars.grammar_worker import compile_job
from reference_server.router.grammar_compiler import GrammarCompiler
from reference_server.workers import WorkerPool


class CompilingHere:
    """Replaces a `WorkerPool`. `jobs`: the requested ones."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    async def run(self, job: Any) -> Any:
        self.jobs.append(job)
        return compile_job(job)


def compiler(pool: CompilingHere | None = None, accepts_schemas: bool = True) -> GrammarCompiler:
    return GrammarCompiler(cast(WorkerPool, pool or CompilingHere()), accepts_schemas)
