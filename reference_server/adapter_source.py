"""`--lora-adapters`: the name of each adapter in requests, and where its files are."""

from collections.abc import Iterable
from dataclasses import dataclass

from reference_server.errors import ArgumentError

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One adapter: `name` is the `adapter_id` of requests.

    location: a directory, a repository of the hub or a built-in `preset:NAME`. revision: of the repository.
    """

    name: str
    location: str
    revision: str | None = None


def parse_adapter(text: str) -> AdapterSource:
    """One element of the list, in TGI's forms. Raises ArgumentError.

    >>> parse_adapter("org/poems@v2")
    AdapterSource(name='org/poems', location='org/poems', revision='v2')
    >>> parse_adapter("poems=/data/poems")
    AdapterSource(name='poems', location='/data/poems', revision=None)
    """
    head, at, revision = text.partition("@")
    name, equals, location = head.partition("=")
    is_wrong = text.count("@") > 1 or text.count("=") > 1 or not name
    if is_wrong or (equals and not location) or (at and not revision):
        raise ArgumentError(
            f"Invalid LoRA adapter format: {text}: expected id, id@revision, name=path, name=id or name=id@revision"
        )
    check_name(name)
    return AdapterSource(name, location or name, revision or None)


def parse_adapters(texts: Iterable[str], model_id: str | None = None) -> tuple[AdapterSource, ...]:
    """The whole list. Raises ArgumentError for a name that occurs twice, or that selects the base model."""
    sources = tuple(map(parse_adapter, texts))
    seen: set[str] = set()
    for source in sources:
        if source.name in seen:
            raise ArgumentError(f"`lora_adapters` has the name {source.name!r} twice")
        if source.name == model_id:
            raise ArgumentError(f"`lora_adapters`: the name {source.name!r} is that of the model: give it another name")
        seen.add(source.name)
    return sources


def check_name(name: str) -> None:
    """Raise ArgumentError for a name that a request cannot select, or that breaks a line of a log."""
    if name == "tgi":
        raise ArgumentError("an adapter cannot have the name 'tgi': it selects the base model")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ArgumentError(f"the name of an adapter must have 1 to {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if not name.isprintable() or not {*name}.isdisjoint(" ,#=@"):
        raise ArgumentError(
            f"the name of an adapter cannot have spaces, control characters or any of , # = @: {name!r}"
        )
