"""`Prompt`: one request as a workload plans it, and clipping of its lengths to the server's limits."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.workloads.prompts.synthetic_image import SyntheticImage


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send.

    `planned_*_tokens` are the workload's lengths, `input_tokens` and `output_tokens` the sent ones after clipping; None
    if unknown or not set. `arrival_ns` is the trace's time. The turns of a session are consecutive in a workload;
    `turns_left` is the number of turns after this one. `parts` are the leading (tokens, key) that other prompts may
    share, `answer_key` continues them in the next turn; `planned_cached_tokens` are those of an unlimited prefix cache,
    at least, and `planned_cached_share` is the share of a text of unknown length. `fields` are further fields of the
    request's body. `adapter` is the LoRA adapter; None is the base model. `images` come before the text.
    """

    prompt_id: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] | None = None
    planned_input_tokens: int | None = None
    planned_output_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    arrival_ns: int | None = None
    session_id: str | None = None
    turn: int = 0
    turns_left: int = 0
    parts: tuple[tuple[int, str], ...] = ()
    answer_key: str | None = None
    planned_cached_tokens: int | None = None
    planned_cached_share: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    images: tuple[SyntheticImage, ...] = ()

    @property
    def num_images(self) -> int:
        """The images of the request: its own, those of its messages, and those in Markdown."""
        contents = [message.get("content") for message in self.messages or ()]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        in_messages = sum(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in parts)
        return len(self.images) + in_messages + self.text.count(MARKDOWN_IMAGE)


# Parts of a message's content, and the start of an image in a text, that carry an image.
IMAGE_PARTS = ("image_url", "image", "input_image")
MARKDOWN_IMAGE = "![](data:image/"
MARKER_TOKENS = 8


def marker(is_cold: bool, key: str) -> list[tuple[int, str]]:
    """The first part of a cold prompt, so that no two share a prefix; empty for other prompts."""
    return [(MARKER_TOKENS, f"cold:{key}")] if is_cold else []


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The server's limits on tokens; None if unknown."""

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None

    def clip(self, input_tokens: int, output_tokens: int) -> tuple[int, int]:
        """The nearest lengths that fit. The prompt is shortened before the answer.

        >>> ServerLimits(max_input_tokens=1000, max_total_tokens=1100).clip(1000, 200)
        (900, 200)
        """
        if self.max_total_tokens is not None:
            output_tokens = min(output_tokens, self.max_total_tokens - 1)
            input_tokens = min(input_tokens, self.max_total_tokens - output_tokens)
        if self.max_input_tokens is not None:
            input_tokens = min(input_tokens, self.max_input_tokens)
        return max(1, input_tokens), max(1, output_tokens)


@dataclass(slots=True)
class ClipCount:
    """Requests and tokens that were clipped to the server's limits."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, prompt: Prompt) -> None:
        cut_in = max(0, (prompt.planned_input_tokens or 0) - (prompt.input_tokens or prompt.planned_input_tokens or 0))
        cut_out = max(
            0, (prompt.planned_output_tokens or 0) - (prompt.output_tokens or prompt.planned_output_tokens or 0)
        )
        self.requests += bool(cut_in or cut_out)
        self.input_tokens += cut_in
        self.output_tokens += cut_out

    def to_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)
