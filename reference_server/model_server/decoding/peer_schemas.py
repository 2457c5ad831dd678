"""JSON schemas that another router sends as they are: made regexes here as ours makes them, in a killable worker.

Ours sends regexes only (grpc.md section 6.1), so a worker is started for each schema and ended after it.
"""

import logging
from collections import OrderedDict
from dataclasses import replace

from reference_server.errors import OverloadedError, StartupError
from reference_server.grammars.packages import missing_packages
from reference_server.grammars.pool import worker_pool
from reference_server.messages import Batch, GrammarType, Request
from reference_server.workers import JobError, JobLimitError

logger = logging.getLogger(__name__)

MAX_KEPT = 32


class PeerSchemas:
    """Regexes of schemas; the last ones are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()

    async def as_regexes(self, batch: Batch) -> Batch:
        """The batch with regexes for schemas. A schema that makes none stays, and fails its request."""
        if all(request.parameters.grammar_type is not GrammarType.JSON for request in batch.requests):
            return batch
        return replace(batch, requests=tuple([await self._with_regex(request) for request in batch.requests]))

    async def _with_regex(self, request: Request) -> Request:
        asked = request.parameters
        if asked.grammar_type is not GrammarType.JSON or not asked.grammar:
            return request
        regex = self._kept.get(asked.grammar)
        if regex is None:
            regex = await _compiled(asked.grammar)
        if regex is None:
            return request
        self._kept[asked.grammar] = regex
        self._kept.move_to_end(asked.grammar)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return replace(request, parameters=replace(asked, grammar=regex, grammar_type=GrammarType.REGEX))


async def _compiled(schema: str) -> str | None:
    if missing_packages():
        return None
    pool = worker_pool(1)
    try:
        await pool.start()
        answer: dict[str, str] = await pool.run(["schema", schema])
    except (StartupError, JobError, JobLimitError, OverloadedError) as error:
        logger.warning("a JSON schema was not compiled: %s", error)
        return None
    finally:
        await pool.close()
    if "regex" not in answer:
        logger.warning("a JSON schema is refused: %s", answer["detail"])
    return answer.get("regex")
