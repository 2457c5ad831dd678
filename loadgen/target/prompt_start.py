"""Tokens of a prompt before its own text, those of the chat template and of the run's marker, measured with probes."""

import itertools
import json
import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from loadgen.dialects.dialect import BadPayloadError, Dialect, NotThisApiError, ParsedAnswer
from loadgen.errors import TargetError
from loadgen.target.control import ControlClient
from loadgen.target.server_kind import ServerKind
from loadgen.workloads.prompts.prompt import Prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Two prompts that differ in their first word. `dialect` does not stream; `key` is new for every run."""

    control: ControlClient
    dialect: Dialect
    kind: ServerKind
    key: str

    def tokens(self, start: str) -> int:
        """Tokens before the words after `start`, which is at the beginning of both prompts.

        By their tokens, if the server has a route for the tokens of messages; by the cached tokens of the second
        prompt; if the server reports neither, the tokens of the first without its own, which include those after its
        text. 0 if it counts none.
        """
        first, second = (f"{start}{word}" for word in self._words())
        tokens = [found for text in (first, second) if (found := self._tokens(text)) is not None]
        if len(tokens) == 2:
            same = (one == other for one, other in zip(*tokens, strict=False))
            return sum(itertools.takewhile(bool, same))
        answers = [self._answer(text) for text in (first, second)]
        if answers[1].cached_input_tokens is not None:
            return answers[1].cached_input_tokens
        return max(0, (answers[0].input_tokens or 1) - 1)

    def _words(self) -> list[str]:
        """Two words with other first letters: one token each with most tokenizers."""
        return random.Random(f"start:{self.key}").sample(LETTERS, 2)

    def _tokens(self, text: str) -> list[Any] | None:
        """The tokens of a message with its template; None if the server has no route for them."""
        route = self.kind.tokenize
        if route is None or not route.chat_reply:
            return None
        body = json.dumps({"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}).encode()
        try:
            status, content = self.control.post(route.path, body)
            found = json.loads(content).get(route.chat_reply) if status == HTTPStatus.OK else None
        except (TargetError, ValueError, AttributeError):
            return None
        return found if isinstance(found, list) else None

    def _answer(self, text: str) -> ParsedAnswer:
        """The counts of an answer of one token; none if it failed."""
        answer = ParsedAnswer()
        try:
            status, body = self.control.post(
                self.dialect.path, self.dialect.body(Prompt("probe", text=text, output_tokens=1))
            )
            if status == HTTPStatus.OK:
                self.dialect.read_whole(body, answer)
        except (TargetError, BadPayloadError, NotThisApiError):
            return ParsedAnswer()
        return answer
