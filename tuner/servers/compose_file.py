"""A Docker Compose file of an exported container."""

import json
from collections.abc import Sequence

from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import GRACE_S, START_LIMIT_S, comment_lines


def compose_text(text: str) -> str:
    """A quoted word of a Compose file, which replaces `$NAME` unless it is escaped.

    >>> compose_text("a $TOKEN")
    '"a $$TOKEN"'
    """
    return json.dumps(text.replace("$", "$$"))


def compose_file(container: ExportedContainer, *, published: int) -> str:
    """One service, reachable from this machine at the port `published`. Strings are quoted as in JSON."""
    port, command, environment = container.port, container.command, container.environment
    probe = f"curl -fsS http://127.0.0.1:{port}{container.ready}"
    gpus = "{driver: nvidia, count: all, capabilities: [gpu]}"
    lines = [
        *comment_lines(container.comments),
        "services:",
        f"  {container.name}:",
        f"    image: {compose_text(container.image)}",
        *([f"    entrypoint: {_list(command)}"] if command else []),
        f"    command: {_list(container.words)}",
        *(["    environment:"] if environment else []),
        *(f"      {json.dumps(variable)}: {compose_text(value)}" for variable, value in environment.items()),
        f'    ports: ["127.0.0.1:{published}:{port}"]',
        '    volumes: ["./data:/data"]',
        "    shm_size: 1g",
        "    restart: unless-stopped",
        f"    stop_grace_period: {GRACE_S}s",
        "    healthcheck:",
        f'      test: ["CMD-SHELL", {compose_text(probe)}]',
        f"      start_period: {START_LIMIT_S}s",
        "      interval: 10s",
        "      timeout: 5s",
        "      retries: 6",
        *([f"    deploy: {{resources: {{reservations: {{devices: [{gpus}]}}}}}}"] if container.gpus else []),
    ]
    return "\n".join(lines) + "\n"


def _list(words: Sequence[str]) -> str:
    return "[" + ", ".join(map(compose_text, words)) + "]"
