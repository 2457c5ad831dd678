"""The worker process that compiles a chat template and renders conversations.

It imports little, so that it starts fast and fits within its memory limit.
"""

from collections.abc import Mapping
from typing import Any

from reference_server.errors import StartupError, TemplateError
from reference_server.router.chat.prompts import ChatTemplate
from reference_server.workers import Job, serve_jobs


def make_job(setup: Mapping[str, Any]) -> Job:
    """The function that renders a conversation."""
    template = ChatTemplate(setup["source"], setup["bos_token"], setup["eos_token"], setup["max_characters"])

    def render(conversation: Mapping[str, Any]) -> str:
        try:
            return template.render_conversation(**conversation)
        except TemplateError as error:
            raise _DetailError(error.detail) from error

    return render


class _DetailError(Exception):
    """The error without the prefix that the answer adds."""


if __name__ == "__main__":
    serve_jobs(make_job, (StartupError, _DetailError))
