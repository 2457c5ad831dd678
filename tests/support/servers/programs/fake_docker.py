"""`docker` for tests: `run` becomes the scripted stream server on the published port; all words are kept in a file."""

import itertools
import json
import os
import sys
from pathlib import Path

NOTES = "FAKE_DOCKER_NOTES"


def install(directory: Path) -> dict[str, str]:
    """Put it into a directory; returns the variables that make it found."""
    script = directory / "docker"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.servers.programs.fake_docker "$@"\n')
    script.chmod(0o755)
    return {
        "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[4]),
        NOTES: str(directory / "notes.jsonl"),
    }


def notes(directory: Path) -> list[list[str]]:
    return [json.loads(line) for line in (directory / "notes.jsonl").read_text().splitlines()]


def main(words: list[str]) -> None:
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words[0] == "image":
        print("sha256:0123")
    if words[0] != "run":
        return
    Path(words[words.index("--cidfile") + 1]).write_text("c0ffee")
    variables = dict(word.split("=", 1) for option, word in itertools.pairwise(words) if option == "--env")
    server = [sys.executable, "-m", "tests.support.servers.serve_stream", "--port", variables["PORT"]]
    os.execv(sys.executable, server)


if __name__ == "__main__":
    main(sys.argv[1:])
