"""The features of each client, the command that checks them, and the table of the outcomes."""

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.clients.client_environments import Environment

#: The columns, in order.
FEATURES = {
    "generate": "generate",
    "generate_stream": "generate streamed",
    "completions": "completions",
    "completions_stream": "completions streamed",
    "chat": "chat",
    "chat_stream": "chat streamed",
    "tools": "tools",
    "tools_stream": "tools streamed",
    "json_schema": "JSON schema",
    "async": "async",
    "errors": "errors",
}
RUN_S = 300

_HERE = Path(__file__).parent
#: Settings of the user's that clients would follow elsewhere.
_OWN_SETTINGS = ("PYTHON", "OPENAI_", "HF_", "HUGGING", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "GUIDELLM_", "AIPERF_")

HEAD = """\
# Clients

These clients are tested unmodified against a launched server (`preset:tiny-llama`). Each client has its own
environment, because they need different versions of huggingface_hub. `make clients` runs the tests and prints this
table; `make clients CLIENTS_PAGE=docs/clients.md` writes this page. The environments are in
`~/.cache/tgi-bench/clients`, or in `TGI_BENCH_CLIENTS_DIR` if it is set; they take about 4 GB. A client is left out,
with a message, only if no package index can be reached.
"""
TAIL = """
An empty cell means that the client does not have the feature, or has it in another column. For the load tools, `yes`
means a short run without an error and with the requested counts. The calls of each client are in
`tests/clients/scripts`, and the installed packages in `tests/clients/clients.toml`.

Notes for users of these clients:

* A refusal has TGI's body, `{"error": "…", "error_type": "…"}`. The text of `openai`'s exception has only the status;
  the reason is in its `body`.
* To force the requested answer length, guidellm sends vLLM's `ignore_eos`, which the OpenAI routes support. For aiperf,
  use `--extra-inputs ignore_eos:true`, and for its requests to `/generate` `ignore_eos_token:true`.
"""


@dataclass(frozen=True, slots=True)
class Client:
    """One entry of clients.toml."""

    name: str
    requirements: Sequence[str]
    shown: Sequence[str]
    features: Sequence[str]
    cannot: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = {*self.features, *self.cannot} - FEATURES.keys()
        assert not unknown, f"{self.name}: there are no features {sorted(unknown)}"

    @property
    def script(self) -> Path:
        return _HERE / "scripts" / f"use_{self.name.replace('-', '_')}.py"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of a client's script: for each feature None if it passed, otherwise the reason."""

    client: Client
    versions: Mapping[str, str]
    failures: Mapping[str, str | None]


def load_clients() -> list[Client]:
    table = tomllib.loads((_HERE / "clients.toml").read_text())
    return [Client(name, **entry) for name, entry in table.items()]


def run_client(client: Client, environment: Environment, url: str, tokenizer: Path) -> Outcome:
    """Run a client's script to its end. Raises `CalledProcessError` if it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_SETTINGS)}
    environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "DO_NOT_TRACK": "1"}
    # The hub is a closed port: what a client needs is here.
    environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", **client.environ}
    command = [str(environment.python), str(client.script), url, str(tokenizer)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, env=environ, text=True, check=True, timeout=RUN_S)
    # A client may print lines of its own.
    reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"feature":')]
    return Outcome(
        client,
        {name: environment.version_of(name) for name in client.shown},
        {report["feature"]: None if report["passed"] else report["detail"] for report in reports},
    )


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Clients by features as a Markdown table, followed by the reason for each feature that a client does not have."""
    reasons: list[str] = []
    lines = ["| client | " + " | ".join(FEATURES.values()) + " |", "|---" * (1 + len(FEATURES)) + "|"]
    for outcome in outcomes:
        versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        cells = [_cell(outcome, feature, reasons) for feature in FEATURES]
        lines.append("| " + " | ".join([versions, *cells]) + " |")
    return "\n".join([*lines, *(f"\n[{number}] {reason}" for number, reason in enumerate(reasons, 1))])


def render_page(outcomes: Sequence[Outcome]) -> str:
    return "\n".join([HEAD, render_table(outcomes), TAIL])


def _cell(outcome: Outcome, feature: str, reasons: list[str]) -> str:
    if feature in outcome.failures:
        return "yes" if outcome.failures[feature] is None else "**fails**"
    if feature in outcome.client.features:
        return "**not run**"
    if feature not in outcome.client.cannot:
        return ""
    reasons.append(f"{outcome.client.name}, {FEATURES[feature]}: {outcome.client.cannot[feature]}.")
    return f"no [{len(reasons)}]"
