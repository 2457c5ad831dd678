"""The names of load modes, workloads and APIs, and what groups of them have in common."""

from typing import Literal

Mode = Literal["closed", "constant", "poisson", "gamma", "burst", "stages", "sessions", "trace"]
WorkloadName = Literal[
    "synthetic", "shared_prefix", "multi_turn", "prompts", "sharegpt", "azure_llm", "burstgpt", "mooncake"
]
ApiName = Literal["auto", "tgi", "openai-chat", "openai-completions"]

TRACE_WORKLOADS = ("azure_llm", "burstgpt", "mooncake")
GENERATED_WORKLOADS = ("synthetic", "shared_prefix", "multi_turn")
FILE_WORKLOADS = ("prompts", "sharegpt")
RATE_MODES = ("constant", "poisson", "gamma", "sessions")
THINKING_MODES = ("closed", "sessions")

# Words that the documents call modes and that are commands.
COMMAND_MODES = ("sweep", "search")
