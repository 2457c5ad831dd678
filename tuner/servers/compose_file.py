"""A Docker Compose file of an exported container."""

import json
from collections.abc import Mapping, Sequence

from tuner.servers.exported_text import CONTAINER_PORT, GRACE_S, START_LIMIT_S, comment_lines


def compose_text(text: str) -> str:
    """A quoted word of a Compose file, which replaces `$NAME` unless it is escaped.

    >>> compose_text("a $TOKEN")
    '"a $$TOKEN"'
    """
    return json.dumps(text.replace("$", "$$"))


def compose_file(
    name: str,
    image: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    comments: Sequence[str],
    *,
    published: int,
    port: int = CONTAINER_PORT,
    ready: str = "/health",
    command: Sequence[str] = (),
    has_gpus: bool = True,
) -> str:
    """One service, reachable from this machine at the port `published`. Strings are quoted as in JSON."""
    probe = f"curl -fsS http://127.0.0.1:{port}{ready}"
    gpus = "{driver: nvidia, count: all, capabilities: [gpu]}"
    lines = [
        *comment_lines(comments),
        "services:",
        f"  {name}:",
        f"    image: {compose_text(image)}",
        *([f"    entrypoint: {_list(command)}"] if command else []),
        f"    command: {_list(words)}",
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
        *([f"    deploy: {{resources: {{reservations: {{devices: [{gpus}]}}}}}}"] if has_gpus else []),
    ]
    return "\n".join(lines) + "\n"


def _list(words: Sequence[str]) -> str:
    return "[" + ", ".join(map(compose_text, words)) + "]"
