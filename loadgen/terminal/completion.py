"""Shell completion: the script that a shell reads once, and the candidates that it then gets for a line being typed."""

import argparse
from collections.abc import Iterator, Sequence

from loadgen.terminal.command_parser import CommandParser
from loadgen.terminal.flags import OneOf, Rare

COMMAND, CANDIDATES = "completion", "--complete"

# The program prints one candidate a line; without any, the shell completes files.
_BASH = """\
_{function}() {{
    local IFS=$'\\n'
    COMPREPLY=($({program} {candidates} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _{function} {program}
"""
_ZSH = """_{function}() {{
    local -a found
    found=(${{(f)"$({program} {candidates} "${{(@)words[2,CURRENT-1]}}" "$PREFIX" 2>/dev/null)"}})
    if (( $#found )); then compadd -a found; else _files; fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _{function} {program}
"""
_FISH = """function __{function}
    set -l words (commandline -opc)
    set -e words[1]
    set -l current (commandline -ct)
    set -l found ({program} {candidates} $words "$current" 2>/dev/null)
    if set -q found[1]
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c {program} -f -a '(__{function})'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
SHELLS = tuple(_SCRIPTS)


def line_of(program: str, shell: str) -> str:
    """The line of a shell's start file that installs the completion."""
    call = f"{program} {COMMAND} {shell}"
    return f"{call} | source" if shell == "fish" else f'eval "$({call})"'


def script_of(program: str, shell: str) -> str:
    """The script of a shell. shell: one of `SHELLS`."""
    return _SCRIPTS[shell].format(program=program, candidates=CANDIDATES, function=program.replace("-", "_"))


def candidates(parser: CommandParser, words: Sequence[str]) -> list[str]:
    """The words that can stand for the last one; empty where a file or free text does.

    words: those of the line after the program, up to the cursor; the last is empty at the start of a word.
    """
    # bash splits `--mode=po` into three words.
    *before, current = [word for word in words[:-1] if word != "="] + [words[-1].removeprefix("=")] if words else [""]
    named = parser.named(before)
    awaited = _awaiting(named, before)
    if awaited is not None:
        return _beginning(_values(awaited), current)
    if current.startswith("-"):
        flag, has_value, value = current.partition("=")
        if has_value:
            action = named._option_string_actions.get(flag)
            return [f"{flag}={each}" for each in _beginning(_values(action), value)] if action else []
        return _beginning(_flags(named), current)
    return _beginning(
        (each for action in named._actions if not action.option_strings for each in _values(action)), current
    )


def _awaiting(parser: CommandParser, before: Sequence[str]) -> argparse.Action | None:
    """The flag whose value comes next."""
    action = parser._option_string_actions.get(before[-1]) if before else None
    return action if action is not None and action.nargs != 0 else None


def _values(action: argparse.Action) -> Iterator[str]:
    if action.choices is not None:
        yield from map(str, action.choices)
    elif isinstance(action.metavar, OneOf):
        yield from action.metavar.values


def _flags(parser: CommandParser) -> Iterator[str]:
    """Long names; those of rare flags last."""
    for action in sorted(parser._actions, key=lambda action: isinstance(action.help, Rare)):
        yield from (name for name in action.option_strings if name.startswith("--"))


def _beginning(words: Iterator[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]
