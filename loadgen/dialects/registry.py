"""The API dialects by name."""

from collections.abc import Callable

from loadgen.dialects.anthropic import AnthropicMessages
from loadgen.dialects.dialect import Dialect, Sampling
from loadgen.dialects.ollama import OllamaChat, OllamaGenerate
from loadgen.dialects.openai import OpenAiChat, OpenAiCompletions
from loadgen.dialects.tgi import Tgi

DIALECTS: dict[str, Callable[[Sampling], Dialect]] = {
    "tgi": Tgi,
    "openai-chat": OpenAiChat,
    "openai-completions": OpenAiCompletions,
    "anthropic": AnthropicMessages,
    "ollama-chat": OllamaChat,
    "ollama-generate": OllamaGenerate,
}
