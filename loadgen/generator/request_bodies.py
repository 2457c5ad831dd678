"""Request bodies: encoded before the load starts, and completed with the server's real answers during it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from loadgen.dialects.dialect import Dialect, ParsedAnswer
from loadgen.workloads.prompts.prompt import Prompt

MAX_PREPARED_BYTES = 64 * 2**20


class PreparedRequests:
    """An iterator of (prompt, body). Encoding a long prompt during the load would delay other requests' events."""

    def __init__(self, prompts: Iterator[Prompt], dialect: Dialect) -> None:
        self._prompts = prompts
        self._dialect = dialect
        self._ready: deque[tuple[Prompt, bytes]] = deque()

    def prepare(self, count: int, max_bytes: int = MAX_PREPARED_BYTES) -> None:
        """Encode up to `count` requests, until `max_bytes` are reached."""
        size = 0
        while len(self._ready) < count and size < max_bytes:
            request = self._encode_next()
            if request is None:
                return
            self._ready.append(request)
            size += len(request[1])

    def __iter__(self) -> Iterator[tuple[Prompt, bytes]]:
        return self

    def __next__(self) -> tuple[Prompt, bytes]:
        request = self._ready.popleft() if self._ready else self._encode_next()
        if request is None:
            raise StopIteration
        return request

    def _encode_next(self) -> tuple[Prompt, bytes] | None:
        prompt = next(self._prompts, None)
        return None if prompt is None else (prompt, self._dialect.body(prompt))


@dataclass(slots=True)
class Conversations:
    """The server's answers in the sessions under way, which replace the scripted answers in the next prompts."""

    dialect: Dialect
    _answers: dict[str, list[str]] = field(default_factory=dict)

    def complete(self, prompt: Prompt, body: bytes) -> tuple[Prompt, bytes]:
        """The turn with the real answers before it; a turn clipped to the server's limits keeps the scripted ones."""
        answers = self._answers.get(prompt.session_id or "")
        is_clipped = prompt.input_tokens != prompt.planned_input_tokens
        if not answers or prompt.messages is None or is_clipped:
            return prompt, body
        following = iter(answers)
        messages = tuple(
            {**message, "content": next(following, message["content"])} if message["role"] == "assistant" else message
            for message in prompt.messages
        )
        completed = replace(prompt, messages=messages, text="".join(message["content"] for message in messages))
        return completed, self.dialect.body(completed)

    def record(self, prompt: Prompt, answer: ParsedAnswer, *, is_ok: bool) -> None:
        """Store an answer for the following turns; drop the session after its last turn or a failure."""
        session = prompt.session_id or ""
        if prompt.turns_left and is_ok:
            self._answers.setdefault(session, []).append(answer.text)
        else:
            self._answers.pop(session, None)
