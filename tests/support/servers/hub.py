"""A small model hub over HTTP with the routes of huggingface_hub: commits, file lists, digests, ranges, tokens."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

_REPOSITORY = r"(?P<model_id>[\w.-]+/[\w.-]+)"
_ROUTES = {
    "info": re.compile(rf"/api/models/{_REPOSITORY}(/revision/(?P<revision>.+))?"),
    "tree": re.compile(rf"/api/models/{_REPOSITORY}/tree/(?P<revision>[^/]+)"),
    "storage": re.compile(r"/storage/(?P<commit>\w+)/(?P<name>.+)"),
    "file": re.compile(rf"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<name>.+)"),
}
LARGE_BYTES = 4096


@dataclass
class Repository:
    """Files by commit, commits by branch. With `token`, reading needs it."""

    branches: dict[str, str]
    commits: dict[str, dict[str, bytes]]
    token: str | None = None


@dataclass
class FakeHub:
    """`requests` are (method, path, Range) in order. `faults` act on GETs of a file by its name, the first one first.

    The name `info` is the request for the facts of a repository.
    """

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    faults: dict[str, list["Fault"]] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    # Whether files lie on another host, as the hub's large ones do; the token must not be sent there.
    has_storage: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, model_id: str, files: Mapping[str, bytes], revision: str = "main", token: str | None = None) -> str:
        """Commit `files` on a branch; the commit."""
        digest = hashlib.sha1()
        for name in sorted(files):
            digest.update(name.encode() + b"\0" + files[name])
        commit = digest.hexdigest()
        repository = self.repositories.setdefault(model_id, Repository({}, {}, token))
        repository.branches[revision] = commit
        repository.commits[commit] = dict(files)
        return commit

    def asked(self, method: str, name: str) -> list[str | None]:
        """The requested ranges, one for each request of that file."""
        return [wanted for verb, path, wanted in self.requests if verb == method and path.endswith(f"/{name}")]


@dataclass(frozen=True)
class Fault:
    """A status to answer, a number of bytes after which the connection breaks or stalls, zeros instead of the bytes."""

    status: int | None = None
    break_after: int | None = None
    stall_after: int | None = None
    wrong: bool = False


def etag_of(content: bytes) -> str:
    """The hub's digest of a file: SHA-256 of a large file, git's hash of any other."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.hub.closing.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def _hub(self) -> FakeHub:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self._hub.requests.append((self.command, path, self.headers.get("Range")))
        route, match = next(
            ((route, match) for route, pattern in _ROUTES.items() if (match := pattern.fullmatch(path))), (None, None)
        )
        if match is None:
            return self._refuse(404, "RepoNotFound")
        if route == "storage":
            assert "Authorization" not in self.headers
            files = next(each.commits[match["commit"]] for each in self._hub.repositories.values())
            return self._send_file(match["name"], files[match["name"]], match["commit"])
        model_id, revision = match["model_id"], unquote(match["revision"] or "main")
        repository = self._hub.repositories.get(model_id)
        # As on the hub, a private repository is "not found" without its token.
        if repository is None or (
            repository.token is not None and self.headers.get("Authorization") != f"Bearer {repository.token}"
        ):
            return self._refuse(401, "RepoNotFound")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if route == "info":
            if (fault := self._fault("info")).status is not None:
                return self._refuse(fault.status, "")
            return self._send_json({"id": model_id, "sha": commit, "siblings": [{"rfilename": name} for name in files]})
        if route == "tree":
            return self._send_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": etag_of(content)}
                    for name, content in files.items()
                ]
            )
        name = unquote(match["name"])
        if name not in files:
            return self._refuse(404, "EntryNotFound", commit)
        if self._hub.has_storage:
            return self._redirect(f"/storage/{commit}/{name}", files[name], commit)
        return self._send_file(name, files[name], commit)

    def _refuse(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _redirect(self, path: str, content: bytes, commit: str) -> None:
        # The same machine by another name.
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}{path}")
        self.send_header("X-Linked-Etag", f'"{etag_of(content)}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, content: bytes, commit: str) -> None:
        fault = self._fault(name)
        if fault.status is not None:
            return self._refuse(fault.status, "")
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{etag_of(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        limit = fault.break_after or fault.stall_after
        body = content[start:] if limit is None else content[start : start + limit]
        self.wfile.write(bytes(len(body)) if fault.wrong else body)
        self._hub.bytes_sent[name] = self._hub.bytes_sent.get(name, 0) + len(body)
        if fault.stall_after is not None:
            self._hub.closing.wait()
        self.close_connection = True
        return None

    def _fault(self, name: str) -> Fault:
        faults = self._hub.faults.get(name, []) if self.command == "GET" else []
        return faults.pop(0) if faults else Fault()
