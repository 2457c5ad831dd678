"""Exported settings as text: TOML values, comment lines, and words of Kubernetes objects.

TOML is written here because `tomli-w` splits a list over several lines, and a default is commented out as one line.
"""

import json
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


def k8s_text(text: str) -> str:
    """A word of a container's command, arguments or variables: Kubernetes replaces `$(NAME)` unless it is escaped.

    >>> k8s_text("a $(TOKEN) $x")
    'a $$(TOKEN) $x'
    """
    return text.replace("$(", "$$(")
