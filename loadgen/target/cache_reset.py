"""Empties the prefix cache of a server before a run, and confirms it with requests whose cached tokens are reported."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from loadgen.dialects.dialect import BadPayloadError, Dialect, NotThisApiError, ParsedAnswer
from loadgen.errors import TargetError, UsageError
from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import MetricsSource, open_metrics_sources
from loadgen.target.server_kind import ResetRoute, ServerKind
from loadgen.target.target import Target
from loadgen.target.telemetry import Scrape, parse_prometheus
from loadgen.workloads.prompts.prompt import Prompt

# A server refuses a reset while requests run.
BUSY_LIMIT_S = 30.0
POLL_S = 0.2
# More than a block of any known server has tokens.
PROBE = Prompt("reset", text=" ".join(f"{number}" for number in range(100, 350)), output_tokens=1)


@dataclass(frozen=True, slots=True)
class CacheReset:
    """A reset of one server, by the cached tokens of one prompt before and after it; `sources` have its counters."""

    kind: ServerKind
    control: ControlClient
    dialect: Dialect
    sources: Sequence[MetricsSource]

    def confirm(self) -> str:
        """Reset the cache. Returns a sentence for the report. Raises TargetError if it is not empty afterwards."""
        self._cached_tokens()
        before = self._cached_tokens()
        if not before:
            return "not needed: the server caches no prompts"
        self._reset(self.kind.reset or ResetRoute(""))
        after = self._cached_tokens()
        if after:
            raise TargetError(
                f"{self.control.url}: after the reset of the prefix cache a known prompt still had {after} cached "
                f"tokens of {before}; restart the server" + self.kind.reset_hint
            )
        return f"confirmed: {before} cached tokens of a known prompt before, 0 after"

    def _cached_tokens(self) -> int:
        """The cached tokens of the probe, by its response or by the server's counters. Raises TargetError."""
        counted = self._counter()
        status, body = self.control.post(self.dialect.path, self.dialect.body(PROBE))
        answer = ParsedAnswer()
        try:
            if status == HTTPStatus.OK:
                self.dialect.read_whole(body, answer)
        except (BadPayloadError, NotThisApiError):
            status = HTTPStatus.BAD_GATEWAY
        if status != HTTPStatus.OK or answer.error is not None:
            text = body[:200].decode(errors="replace")
            raise TargetError(f"{self.control.url}{self.dialect.path}: status {status} for the probe: {text}", status)
        if answer.cached_input_tokens is not None:
            return answer.cached_input_tokens
        now = self._counter()
        if now is None or counted is None:
            raise TargetError(
                f"{self.control.url}: neither responses nor metrics have cached tokens, so a reset cannot be "
                "confirmed; leave out --reset-cache"
            )
        return round(now - counted)

    def _counter(self) -> float | None:
        """The sum over the sources that have the counter; None if none has it."""
        if not self.kind.hit_counter:
            return None
        texts = [text for source in self.sources if (text := source.text()) is not None]
        samples = [sample for text in texts for sample in parse_prometheus(text)]
        return Scrape(0, samples).total((self.kind.hit_counter,))

    def _reset(self, route: ResetRoute) -> None:
        """Call the route, again while the server is busy. Raises TargetError."""
        deadline_s = time.monotonic() + BUSY_LIMIT_S
        for path in self._paths(route):
            while True:
                status, body = self.control.post(path, b"{}")
                if status == HTTPStatus.OK and not _is_refused(body):
                    break
                is_busy = status in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)
                if not is_busy or time.monotonic() > deadline_s:
                    raise TargetError(
                        f"{self.control.url}{path}: status {status}: the prefix cache was not emptied"
                        + self.kind.reset_hint,
                        status,
                    )
                time.sleep(POLL_S)

    def _paths(self, route: ResetRoute) -> list[str]:
        if not route.is_per_slot:
            return [route.path]
        properties = self.control.get_json("/props")
        slots = properties.get("total_slots") if isinstance(properties, dict) else None
        return [route.path.replace("{slot}", str(slot)) for slot in range(slots if isinstance(slots, int) else 0)]


def reset_cache(target: Target, kind: ServerKind, dialect: Dialect, metrics_urls: Sequence[str] = ()) -> str:
    """Empty the prefix cache of a server; its counters are at `metrics_urls`, by default at its own URL.

    Raises UsageError if its kind has no route for it, and TargetError.
    """
    if kind.reset is None:
        raise UsageError(
            f"`reset_cache` is true, but {kind.title} has no route that empties its prefix cache; restart the server"
        )
    control = target.control()
    try:
        with open_metrics_sources([target.url], target.access, metrics_urls) as sources:
            return CacheReset(kind, control, dialect, sources).confirm()
    finally:
        control.close()


def _is_refused(body: bytes) -> bool:
    """Whether a reply has `success: false`, as vLLM's has while requests hold blocks."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("success") is False
