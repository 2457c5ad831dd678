"""Exported settings as text: TOML values, comment lines, and one line for each flag.

TOML is written here because `tomli-w` splits a list over several lines, and a default is commented out as one line.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.errors import SpaceError

CONTAINER_PORT = 80
# Until a pod is ready, and until a stopping pod has finished its requests.
START_LIMIT_S, GRACE_S = 1800, 120


def render_toml(settings: Mapping[str, Any], defaults: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Comment lines, then the settings as TOML. A setting at its default is commented out.

    >>> print(render_toml({"port": 3000, "max_waiting_tokens": 7}, {"port": 3000}, ["found by a study"]))
    # found by a study
    <BLANKLINE>
    # port = 3000
    max_waiting_tokens = 7
    <BLANKLINE>
    """
    lines = [*comment_lines(comments), ""]
    for name, value in settings.items():
        line = f"{name} = {toml_value(value)}"
        lines.append(f"# {line}" if name in defaults and value == defaults[name] else line)
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses a bare DEL


def comment_lines(comments: Sequence[str]) -> list[str]:
    """Each comment on one line. Control characters are escaped.

    >>> comment_lines(["found\\nrm -rf x"])
    ['# found\\\\nrm -rf x']
    """
    return [f"# {''.join(map(_visible, comment))}".rstrip() for comment in comments]


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def check_values(settings: Mapping[str, Any]) -> None:
    """Raises SpaceError for a value with a control character: a line break would start a new command in a script."""
    for name, value in settings.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, str) and not each.isprintable():
                raise SpaceError(f"`{name}` is {each!r}: a setting with control characters cannot be exported")


def image_note(image: str) -> list[str]:
    """A comment if the content of the image can change later; else empty."""
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    is_moving = not digest and tag in ("", "latest")
    return [f"Uses the newest {image}: pin its version or digest."] if is_moving else []


def flag_lines(words: Sequence[str]) -> list[str]:
    """One line for each flag with its value."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append([word])
        else:
            lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def docker_script(
    image: str, words: Sequence[str], environment: Mapping[str, str], comments: Sequence[str], options: Sequence[str]
) -> str:
    """A shell script that runs a container. `options`: options of `docker run`, already quoted for the shell."""
    flags = [
        *("docker run --rm", *options),
        *(shlex.join(["-e", f"{name}={value}"]) for name, value in environment.items()),
        shlex.quote(image),
        *flag_lines(words),
    ]
    return "\n".join(["#!/bin/sh", *comment_lines(comments), " \\\n  ".join(flags)]) + "\n"


def k8s_text(text: str) -> str:
    """A word of a container's command, arguments or variables: Kubernetes replaces `$(NAME)` unless it is escaped.

    >>> k8s_text("a $(TOKEN) $x")
    'a $$(TOKEN) $x'
    """
    return text.replace("$(", "$$(")


def k8s_manifest(
    name: str,
    image: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    comments: Sequence[str],
    *,
    port: int = CONTAINER_PORT,
    ready: str = "/health",
    command: Sequence[str] = (),
    gpus: int = 1,
) -> str:
    """A Deployment with probes, and its Service. Strings are quoted as in JSON: YAML cannot read another type."""
    variables = [
        line
        for variable, value in environment.items()
        for line in (
            f"            - name: {json.dumps(variable)}",
            f"              value: {json.dumps(k8s_text(value))}",
        )
    ]
    probe = f"httpGet: {{path: {json.dumps(ready)}, port: {port}}}"
    lines = [
        *comment_lines(comments),
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        f"  name: {name}",
        "spec:",
        "  replicas: 1",
        f"  selector: {{matchLabels: {{app: {name}}}}}",
        "  template:",
        f"    metadata: {{labels: {{app: {name}}}}}",
        "    spec:",
        f"      terminationGracePeriodSeconds: {GRACE_S}",
        "      containers:",
        f"        - name: {name}",
        f"          image: {json.dumps(image)}",
        *([f"          command: {json.dumps([k8s_text(word) for word in command])}"] if command else []),
        f"          args: {json.dumps([k8s_text(word) for word in words])}",
        *(["          env:", *variables] if variables else []),
        f"          ports: [{{containerPort: {port}}}]",
        # Loading the weights takes minutes; until then the other probes do not run.
        f"          startupProbe: {{{probe}, periodSeconds: 5, failureThreshold: {START_LIMIT_S // 5}}}",
        f"          readinessProbe: {{{probe}, periodSeconds: 5}}",
        # A busy server answers late: it is restarted after a minute without an answer.
        f"          livenessProbe: {{{probe}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}}",
        # Requests arrive until all nodes know that the pod stops.
        '          lifecycle: {preStop: {exec: {command: ["sleep", "5"]}}}',
        *([f"          resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}"] if gpus else []),
        "          volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: data, mountPath: /data}]",
        "      volumes:",
        "        - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}",
        "        - {name: data, emptyDir: {}}",
        "---",
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        f"  name: {name}",
        "spec:",
        f"  selector: {{app: {name}}}",
        f"  ports: [{{port: 80, targetPort: {port}}}]",
    ]
    return "\n".join(lines) + "\n"
