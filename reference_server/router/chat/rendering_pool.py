"""Renders chat templates in worker processes, which can be killed."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_server.errors import StartupError, TemplateError
from reference_server.router.chat.prompts import MAX_OUTPUT_CHARACTERS, TemplateSource, conversation_of
from reference_server.workers import JobError, JobLimitError, WorkerLimits, WorkerPool

if TYPE_CHECKING:
    from reference_server.router.chat.tools import ToolOffer
    from reference_server.router.schemas.openai import ChatMessage

logger = logging.getLogger(__name__)

RENDER_S = 2.0
WORKER_BYTES = 512 << 20


class RenderingPool:
    """Renders a template in worker processes, with limits on time, memory and output."""

    def __init__(
        self,
        template: TemplateSource,
        workers: int,
        max_waiting: int,
        max_characters: int = MAX_OUTPUT_CHARACTERS,
        time_s: float = RENDER_S,
    ) -> None:
        setup = {
            "source": template.source,
            "bos_token": template.bos_token,
            "eos_token": template.eos_token,
            "max_characters": max_characters,
        }
        limits = WorkerLimits(time_s, WORKER_BYTES, max_waiting)
        self._pool = WorkerPool("reference_server.router.chat.template_worker", setup, limits, workers)

    async def start(self) -> None:
        """Compile, and render once. Raises `StartupError` if the template cannot be used."""
        await self._pool.start()
        try:
            await self._pool.run({"turns": [{"role": "user", "content": "hello"}]})
        except JobLimitError as error:
            raise StartupError(f"the chat template was stopped: {error}") from error
        except JobError as error:
            logger.warning("the chat template fails on a single user message: %s", error)

    async def render(self, messages: "Sequence[ChatMessage]", offer: "ToolOffer | None" = None) -> str:
        """The prompt of a conversation. Raises `TemplateError`."""
        try:
            text: str = await self._pool.run(conversation_of(messages, offer))
        except (JobError, JobLimitError) as error:
            raise TemplateError(str(error)) from error
        return text

    async def close(self) -> None:
        await self._pool.close()
