"""The model hub and its cache: the files of a commit, and their download."""

import errno
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_server.errors import StartupError
from reference_server.model_server.weights.files import file_names
from reference_server.model_server.weights.resume import fetch_blob

logger = logging.getLogger(__name__)

TOKEN_VARIABLES = "HF_TOKEN (HF_API_TOKEN and HUGGING_FACE_HUB_TOKEN are read too)"
_NO_ACCESS = (401, 403)
_REFUSED = (*_NO_ACCESS, 404)
_NOT_WRITTEN = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a repository: the `names` of its files, and the `directory` of the downloaded ones.

    `place`: the source of the names, the hub or the cache, which may lack some.
    """

    model_id: str
    commit: str
    directory: Path
    names: tuple[str, ...]
    place: str

    def has(self, name: str) -> bool:
        """Whether the file is downloaded or converted."""
        return (self.directory / name).is_file()


class HuggingFaceHub:
    """The hub, through huggingface_hub, which reads HF_ENDPOINT, HF_HUB_OFFLINE and the default cache directory."""

    def __init__(self, token: str | None = None, cache: Path | None = None, endpoint: str | None = None) -> None:
        self._token = token
        self._cache = cache
        self._endpoint = endpoint

    @property
    def is_offline(self) -> bool:
        return bool(_library().constants.HF_HUB_OFFLINE)

    def snapshot(self, model_id: str, revision: str | None) -> Snapshot:
        """The commit of a branch, tag or commit; offline, or if the hub is not reached, the cached one.

        Raises StartupError if none exists or the token may not read it. Without a cached commit, other errors of
        the hub are raised unchanged, since a retry may help.
        """
        library = _library()
        name = revision or library.constants.DEFAULT_REVISION
        try:
            if not self.is_offline:
                return self._ask(model_id, name)
        except library.errors.HFValidationError as error:
            raise StartupError(f"{model_id!r} is neither a directory nor the name of a model on the hub") from error
        except library.errors.RevisionNotFoundError as error:
            raise StartupError(f"model {model_id!r} has no revision {name!r}") from error
        except Exception as error:
            if (status := _status(error)) in _REFUSED:
                raise StartupError(self._refusal(model_id, status)) from error
            logger.warning("The hub does not answer, looking in the cache: %s", first_line(error))
            if status is not None and not self._directory(model_id, self._cached_commit(model_id, name)).is_dir():
                raise
        return self._cached(model_id, name)

    def fetch(self, snapshot: Snapshot, name: str) -> Path:
        """Download a file into the cache.

        Raises StartupError for errors that a retry cannot fix: no access, no such file, not writable.
        """
        library = _library()
        if self.is_offline:
            raise StartupError(f"offline, and {name} of model {snapshot.model_id} is not in the cache")
        try:
            url = library.hf_hub_url(snapshot.model_id, name, revision=snapshot.commit, endpoint=self._endpoint)
            fetch_blob(library, url, self.blobs(snapshot.model_id), self._token)
            path = library.hf_hub_download(
                snapshot.model_id,
                name,
                revision=snapshot.commit,
                token=self._token,
                cache_dir=self._cache,
                endpoint=self._endpoint,
            )
        except Exception as error:
            if (status := _status(error)) in _REFUSED:
                raise StartupError(self._refusal(snapshot.model_id, status, name)) from error
            if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
                raise StartupError(
                    f"{name} of {snapshot.model_id} cannot be written to the hub cache {self._root()}:"
                    f" {error.strerror} (--huggingface-hub-cache names another place)"
                ) from error
            raise
        return Path(path)

    def blobs(self, model_id: str) -> Path:
        """The cache's directory of file contents of a repository."""
        return self._repository(model_id) / "blobs"

    def remember(self, snapshot: Snapshot, revision: str | None) -> None:
        """Record in the cache that `revision` is this commit, to find it offline."""
        name = revision or _library().constants.DEFAULT_REVISION
        if name == snapshot.commit or self.is_offline:
            return
        path = self._repository(snapshot.model_id) / "refs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        new.write_text(snapshot.commit)
        new.replace(path)

    def _ask(self, model_id: str, revision: str) -> Snapshot:
        api = _library().HfApi(token=self._token, endpoint=self._endpoint)
        commit = str(api.model_info(model_id, revision=revision).sha)
        names = tuple(api.list_repo_files(model_id, revision=commit))
        return Snapshot(model_id, commit, self._directory(model_id, commit), names, "on the hub")

    def _cached(self, model_id: str, revision: str) -> Snapshot:
        commit = self._cached_commit(model_id, revision)
        directory = self._directory(model_id, commit)
        if not directory.is_dir():
            raise StartupError(
                f"model {model_id!r} at revision {revision} is not in the cache {self._root()}, and the hub was not"
                " asked (HF_HUB_OFFLINE) or cannot be reached: download it first"
                f" with `text-generation-server download-weights {model_id}`"
            )
        return Snapshot(model_id, commit, directory, tuple(file_names(directory)), "in the cache")

    def _cached_commit(self, model_id: str, revision: str) -> str:
        """The commit of a branch in the cache; a commit is itself."""
        path = self._repository(model_id) / "refs" / revision
        return path.read_text().strip() if path.is_file() else revision

    def _directory(self, model_id: str, commit: str) -> Path:
        return self._repository(model_id) / "snapshots" / commit

    def _repository(self, model_id: str) -> Path:
        from huggingface_hub.file_download import repo_folder_name

        return self._root() / str(repo_folder_name(repo_id=model_id, repo_type="model"))

    def _root(self) -> Path:
        return Path(self._cache or _library().constants.HF_HUB_CACHE)

    def _refusal(self, model_id: str, status: int | None, name: str | None = None) -> str:
        """The reason of a refusal, with the token's variable and never its value."""
        what = f"model {model_id!r}" if name is None else f"{name} of model {model_id!r}"
        if status not in _NO_ACCESS:
            return f"{what} was not found: the hub answers {status}"
        if self._token is None:
            return f"{what} does not exist or needs a token: the hub answers {status}. Set {TOKEN_VARIABLES}"
        return f"{what} does not exist or may not be read with the token of {TOKEN_VARIABLES}: the hub answers {status}"


def _status(error: Exception) -> int | None:
    """The HTTP status of an error."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def first_line(error: Exception) -> str:
    """The first line of an error, without the advice that follows."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _library() -> Any:
    """huggingface_hub, imported on first use, without its log handler, which would duplicate every line."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils
    import huggingface_hub.utils.logging

    logging.getLogger("huggingface_hub").handlers.clear()
    if huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        # Progress is logged.
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub
