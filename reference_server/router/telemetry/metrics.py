"""The `tgi_*` series and their Prometheus text.

Not prometheus-client: it renames counters to `*_total` and adds `*_created`, and TGI has neither. A series is rendered
from its first sample on.
"""

import collections
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from reference_server.messages import DraftCounts, NoDraft, Timings

MAX_ADAPTER_LABELS = 256
OTHER_ADAPTERS = "other"


class MetricSeries(Protocol):
    """One name in the exposition."""

    name: str
    kind: str
    help: str
    label: str | None

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """(suffix, rendered labels, value) of everything observed so far."""
        ...


class Counter:
    """A number that only increases."""

    kind = "counter"

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        self.name, self.help, self.label = name, help, label
        self._values: dict[str, float] = {}

    def add(self, amount: float = 1, label: str = "") -> None:
        self._values[label] = self._values.get(label, 0) + amount

    def value(self, label: str = "") -> float:
        return self._values.get(label, 0)

    @property
    def num_labels(self) -> int:
        return len(self._values)

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for label, value in self._values.items():
            yield "", _labels(self.label, label), value


class Gauge:
    """A number that goes up and down."""

    kind = "gauge"
    label = None

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self._value: float | None = None

    def set(self, value: float) -> None:
        self._value = value

    def samples(self) -> Iterator[tuple[str, str, float]]:
        if self._value is not None:
            yield "", "", self._value


class Histogram:
    """Counts observations at or below each bound."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], label: str | None = None) -> None:
        self.name, self.help, self.label = name, help, label
        self._bounds = list(bounds)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, value: float, label: str = "", times: int = 1) -> None:
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, value)] += times
        self._sums[label] += value * times

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for label, counts in self._counts.items():
            total = 0
            for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
                total += count
                yield "_bucket", _labels(self.label, label, ("le", bound)), total
            yield "_sum", _labels(self.label, label), self._sums[label]
            yield "_count", _labels(self.label, label), total


class Summary:
    """Exact quantiles of small whole numbers."""

    kind = "summary"
    label = None
    QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self._counts: collections.Counter[int] = collections.Counter()

    def observe(self, value: int, times: int = 1) -> None:
        self._counts[value] += times

    def samples(self) -> Iterator[tuple[str, str, float]]:
        count = self._counts.total()
        if count == 0:
            return
        ordered = sorted(self._counts.items())
        for quantile in self.QUANTILES:
            yield "", _labels(None, "", ("quantile", _number(quantile))), _quantile(ordered, count, quantile)
        yield "_sum", "", sum(value * times for value, times in ordered)
        yield "_count", "", count


def render_series(series: Sequence[MetricSeries]) -> bytes:
    """Prometheus text exposition of every series that has a sample."""
    lines: list[str] = []
    for each in series:
        samples = [f"{each.name}{suffix}{labels} {_number(value)}" for suffix, labels, value in each.samples()]
        if samples:
            lines += [f"# HELP {each.name} {each.help}", f"# TYPE {each.name} {each.kind}", *samples]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def duration_bounds() -> list[float]:
    """0.0001 x 1.5^k for k = 1..35, by repeated multiplication as in TGI, so that the printed digits agree."""
    bounds, value = [], 0.0001
    for _ in range(35):
        value *= 1.5
        bounds.append(value)
    return bounds


def share_bounds(limit: int) -> list[float]:
    """A hundred equal steps up to `limit`."""
    return [limit * (percent / 100) for percent in range(1, 101)]


def powers_of_two(largest: int) -> list[float]:
    """1, 2, 4, …, 2^largest."""
    return [float(2**exponent) for exponent in range(largest + 1)]


class Metrics:
    """Every series of the router. The `on_*` methods implement `BatchObserver`."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        seconds = duration_bounds()
        inputs, totals = share_bounds(max_input_tokens), share_bounds(max_total_tokens)
        sizes = [float(size) for size in range(1, 1025)]
        self.request_count = Counter("tgi_request_count", "Requests received.")
        self.request_success = Counter("tgi_request_success", "Generations that delivered their last token.")
        self.request_failure = Counter("tgi_request_failure", "Requests that failed, by cause.", "err")
        self.request_duration = Histogram("tgi_request_duration", "Arrival to last token, seconds.", seconds)
        self.request_validation_duration = Histogram(
            "tgi_request_validation_duration", "Arrival to queued, seconds.", seconds
        )
        self.request_queue_duration = Histogram(
            "tgi_request_queue_duration", "Queued to first batched, seconds.", seconds
        )
        self.request_inference_duration = Histogram(
            "tgi_request_inference_duration", "First batched to last token, seconds.", seconds
        )
        self.request_mean_time_per_token_duration = Histogram(
            "tgi_request_mean_time_per_token_duration", "Inference time divided by generated tokens, seconds.", seconds
        )
        self.request_first_token_duration = Histogram(
            "tgi_request_first_token_duration", "Arrival to first token (TTFT), seconds.", seconds
        )
        self.request_inter_token_duration = Histogram(
            "tgi_request_inter_token_duration",
            "Time between tokens (ITL), seconds; a step's gap is divided by its tokens.",
            seconds,
        )
        self.request_generated_tokens = Histogram(
            "tgi_request_generated_tokens", "Generated tokens of a request.", totals
        )
        self.request_input_length = Histogram("tgi_request_input_length", "Prompt tokens of a request.", inputs)
        self.request_max_new_tokens = Histogram(
            "tgi_request_max_new_tokens", "New tokens requested in one segment.", totals
        )
        self.request_skipped_tokens = Summary(
            "tgi_request_skipped_tokens", "Tokens beyond the first in one delivered step."
        )
        self.queue_size = Gauge("tgi_queue_size", "Requests waiting.")
        self.batch_current_size = Gauge("tgi_batch_current_size", "Requests in the running batch.")
        self.batch_current_max_tokens = Gauge("tgi_batch_current_max_tokens", "Token budget of the running batch.")
        self.free_blocks = Gauge("tgi_free_blocks", "Blocks of K/V on the free list or in the prefix cache.")
        self.total_blocks = Gauge("tgi_total_blocks", "Blocks of K/V that requests can hold.")
        self.batch_max_total_tokens = Gauge("tgi_batch_max_total_tokens", "Tokens that fit in memory.")
        self.batch_next_size = Histogram("tgi_batch_next_size", "Requests in a newly formed batch.", sizes)
        self.batch_generated_tokens = Histogram(
            "tgi_batch_generated_tokens", "Tokens that one model server call generated.", powers_of_two(12), "method"
        )
        self.batch_inference_count = Counter("tgi_batch_inference_count", "Model server calls.", "method")
        self.batch_inference_success = Counter("tgi_batch_inference_success", "Calls that returned.", "method")
        self.batch_inference_failure = Counter("tgi_batch_inference_failure", "Calls that failed.", "method")
        self.batch_inference_duration = Histogram(
            "tgi_batch_inference_duration", "Whole call with filtering, seconds.", seconds, "method"
        )
        self.batch_forward_duration = Histogram(
            "tgi_batch_forward_duration", "Forward time the model server reports, seconds.", seconds, "method"
        )
        self.batch_decode_duration = Histogram(
            "tgi_batch_decode_duration", "Token decoding time the model server reports, seconds.", seconds, "method"
        )
        self.batch_filter_duration = Histogram(
            "tgi_batch_filter_duration", "Time to deliver tokens and to filter the batch, seconds.", seconds, "method"
        )
        self.batch_concat_duration = Histogram(
            "tgi_batch_concat_duration", "Batch merging time the model server reports, seconds.", seconds, "method"
        )
        self.batch_concat = Counter("tgi_batch_concat", "Batches that joined a running one, by reason.", "reason")
        self.adapter_requests = Counter(
            "tgi_adapter_request_count",
            f"Generations by adapter; further names than {MAX_ADAPTER_LABELS} are counted as `{OTHER_ADAPTERS}`.",
            "adapter",
        )
        self.loaded_adapters = Gauge("tgi_adapters", "Loaded adapters.")
        self.adapter_bytes = Gauge("tgi_adapter_bytes", "Memory of the adapters loaded at run time, on one shard.")
        self.prompt_tokens = Counter("tgi_prompt_tokens", "Prompt tokens of requests that were batched.")
        self.prefix_hit_tokens = Counter("tgi_prefix_hit_tokens", "Prompt tokens whose K/V were cached.")
        self.draft_tokens = Counter("tgi_draft_tokens", "Draft tokens that a step verified.")
        self.accepted_tokens = Counter("tgi_accepted_tokens", "Draft tokens that were accepted.")
        self.draft_tokens_by_place = Counter(
            "tgi_draft_tokens_per_position",
            "Draft tokens that a step verified, by their place in the draft, from 1.",
            "position",
        )
        self.accepted_tokens_by_place = Counter(
            "tgi_accepted_tokens_per_position",
            "Draft tokens that were accepted, by their place in the draft, from 1.",
            "position",
        )
        self.undrafted_tokens = Counter(
            "tgi_undrafted_tokens", "Tokens chosen without a draft while drafts are on, by reason.", "reason"
        )

    def on_queue(self, size: int) -> None:
        self.queue_size.set(size)

    def on_batch(self, size: int, reason: str | None, prompt_tokens: int, prefix_hit_tokens: int) -> None:
        self.batch_next_size.observe(size)
        if reason is not None:
            self.batch_concat.add(label=reason)
        self.prompt_tokens.add(prompt_tokens)
        self.prefix_hit_tokens.add(prefix_hit_tokens)

    def on_call(self, method: str) -> None:
        self.batch_inference_count.add(label=method)

    def on_call_done(self, method: str, timings: Timings, total_ns: int, filter_ns: int, tokens: int) -> None:
        self.batch_inference_success.add(label=method)
        self.batch_generated_tokens.observe(tokens, method)
        self.batch_inference_duration.observe(total_ns / 1e9, method)
        self.batch_forward_duration.observe(timings.forward_ns / 1e9, method)
        self.batch_decode_duration.observe(timings.decode_ns / 1e9, method)
        self.batch_filter_duration.observe(filter_ns / 1e9, method)
        if timings.concat_ns is not None:
            # TGI's label, for every method.
            self.batch_concat_duration.observe(timings.concat_ns / 1e9, "decode")

    def on_call_failed(self, method: str) -> None:
        self.batch_inference_failure.add(label=method)

    def on_running(self, size: int, max_tokens: int) -> None:
        self.batch_current_size.set(size)
        self.batch_current_max_tokens.set(max_tokens)

    def on_blocks(self, free: int, total: int) -> None:
        self.free_blocks.set(free)
        self.total_blocks.set(total)

    def on_tokens(self, skipped: int, times: int) -> None:
        self.request_skipped_tokens.observe(skipped, times)

    def on_drafts(self, drafts: DraftCounts) -> None:
        self.draft_tokens.add(sum(drafts.proposed))
        self.accepted_tokens.add(sum(drafts.accepted))
        for place, (proposed, accepted) in enumerate(zip(drafts.proposed, drafts.accepted, strict=True), 1):
            self.draft_tokens_by_place.add(proposed, str(place))
            self.accepted_tokens_by_place.add(accepted, str(place))
        for reason, count in zip(NoDraft, drafts.undrafted, strict=False):
            if count:
                self.undrafted_tokens.add(count, reason)

    def on_adapter(self, name: str) -> None:
        """A generation begins that uses the loaded adapter `name`."""
        counted = self.adapter_requests
        is_new = not counted.value(name) and counted.num_labels >= MAX_ADAPTER_LABELS
        counted.add(label=OTHER_ADAPTERS if is_new else name)

    def on_adapters(self, count: int, nbytes: int) -> None:
        self.loaded_adapters.set(count)
        self.adapter_bytes.set(nbytes)

    def on_failures(self, err: str, count: int) -> None:
        self.request_failure.add(count, err)

    @property
    def series(self) -> list[MetricSeries]:
        """Every series, in the order of `/metrics`."""
        return list(vars(self).values())

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return render_series(self.series)


def _labels(name: str | None, value: str, *more: tuple[str, str]) -> str:
    pairs = ([(name, value)] if name else []) + list(more)
    return "{" + ",".join(f'{key}="{text}"' for key, text in pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    """Shortest decimal that reads back as `value`; whole numbers without a fraction."""
    return str(int(value)) if value == int(value) else repr(value)


def _quantile(ordered: Sequence[tuple[int, int]], count: int, quantile: float) -> int:
    """The smallest value with at least `quantile` of all observations at or below it."""
    seen = 0
    for value, times in ordered:
        seen += times
        if seen >= quantile * count:
            return value
    return ordered[-1][0]
