"""The API dialects by name: those of this package, and those of installed packages."""

from collections.abc import Callable

from loadgen.dialects.anthropic import AnthropicMessages
from loadgen.dialects.dialect import Dialect, Sampling
from loadgen.dialects.ollama import OllamaChat, OllamaGenerate
from loadgen.dialects.openai import OpenAiChat, OpenAiCompletions
from loadgen.dialects.tgi import Tgi
from loadgen.entry_points import Names

DIALECTS: dict[str, Callable[[Sampling], Dialect]] = {
    "tgi": Tgi,
    "openai-chat": OpenAiChat,
    "openai-completions": OpenAiCompletions,
    "anthropic": AnthropicMessages,
    "ollama-chat": OllamaChat,
    "ollama-generate": OllamaGenerate,
}
AUTO = "auto"
API_NAMES = Names("tgi_bench.dialects", (AUTO, *DIALECTS))
MEMBERS = tuple(name for name in vars(Dialect) if not name.startswith("_"))


def open_dialect(name: str, sampling: Sampling) -> Dialect:
    """The dialect of a name. Raises UsageError if that of an installed package is broken."""
    if name in DIALECTS:
        return DIALECTS[name](sampling)
    dialect: Dialect = API_NAMES.call(name, sampling)
    missing = [member for member in MEMBERS if not hasattr(dialect, member)]
    if missing:
        raise API_NAMES.broken(name, f"its {type(dialect).__name__} has no `{missing[0]}`")
    return dialect
