"""Finds a server profile: in this package, in an installed package, or in a TOML file.

A package provides profiles through entry points of the group `tgi_bench.servers`. The name of the entry point is the
name of the profile; its object is the path of the TOML file:

    [project.entry-points."tgi_bench.servers"]
    my-server = "my_package.profiles:MY_SERVER"     # MY_SERVER = Path(__file__).with_name("my-server.toml")
"""

import tomllib
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tuner.errors import SpaceError
from tuner.servers.server_profile import ServerProfile
from tuner.space.expression import ExpressionError

GROUP, SUFFIX = "tgi_bench.servers", ".toml"


def find_profile(name: str) -> ServerProfile:
    """The profile with this name, or in this TOML file. Raises SpaceError with the file, the key and the limit."""
    label, source = _source_of(name)
    try:
        return ServerProfile.model_validate(tomllib.loads(source.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpaceError(f"{label}: not TOML: {error}") from None
    except (OSError, UnicodeDecodeError, ExpressionError) as error:
        raise SpaceError(f"{label}: {error}") from None
    except ValidationError as error:
        raise SpaceError("; ".join(f"{label}: {_problem(each)}" for each in error.errors())) from None


def shipped_profiles() -> list[str]:
    """The names of the profiles in this package."""
    return sorted(each.name.removesuffix(SUFFIX) for each in _folder().iterdir() if each.name.endswith(SUFFIX))


def known_profiles() -> list[str]:
    """The names of the profiles in this package and in installed ones."""
    return sorted({*shipped_profiles(), *(each.name for each in entry_points(group=GROUP))})


def _source_of(name: str) -> tuple[str, Path | Traversable]:
    """A profile's label for messages, and its TOML file. Profiles of this package take precedence."""
    shipped = shipped_profiles()
    if name in shipped:
        return name, _folder() / f"{name}{SUFFIX}"
    installed = {each.name: each for each in entry_points(group=GROUP)}
    if name in installed:
        return f"{name} ({installed[name].value})", _path_of(installed[name])
    if Path(name).is_file():
        return name, Path(name)
    raise SpaceError(f"`profile` is {name}, but must be a TOML file or one of {', '.join(known_profiles())}")


def _path_of(entry: EntryPoint) -> Path | Traversable:
    try:
        found = entry.load()
    except Exception as error:
        raise SpaceError(
            f"profile {entry.name}: cannot load entry point `{entry.value}` of group {GROUP}: {error}"
        ) from error
    if isinstance(found, str):
        return Path(found)
    if not isinstance(found, Path | Traversable):
        raise SpaceError(
            f"profile {entry.name}: `{entry.value}` is {type(found).__name__}, not the path of a TOML file"
        )
    return found


def _folder() -> Traversable:
    return files("tuner.servers") / "profiles"


def _problem(problem: Any) -> str:
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"`{place}` is not a key of a profile"
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = problem["input"]
    shown = f" is {given!r}" if isinstance(given, str | int | float | bool) else ""
    return f"`{place}`{shown}: {message}" if place else message
