"""Which API dialects there are."""

from collections.abc import Callable

from loadgen.protocols.dialect import Dialect, Sampling
from loadgen.protocols.openai import OpenAiChat, OpenAiCompletions
from loadgen.protocols.tgi import Tgi

DIALECTS: dict[str, Callable[[Sampling], Dialect]] = {
    "tgi": Tgi,
    "openai-chat": OpenAiChat,
    "openai-completions": OpenAiCompletions,
}
