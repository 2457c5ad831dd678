"""Messages between the router and a shard: those of `proto/v3/generate.proto` as frozen dataclasses.

Imports neither protobuf nor torch nor asyncio.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a generation ended, in the words of the native JSON API."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class GrammarType(StrEnum):
    """The format of `ChooserParameters.grammar`."""

    NONE = "none"
    JSON = "json"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A regex, or a JSON schema's text."""

    text: str
    type: GrammarType = GrammarType.REGEX


@dataclass(frozen=True, slots=True)
class ChooserParameters:
    """How the next token is chosen. Every default is the value that means "off".

    grammar_prefix_chars: of a continued generation, the length of the prompt's end that the grammar has accepted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    grammar: str = ""
    grammar_type: GrammarType = GrammarType.NONE
    grammar_prefix_chars: int = 0

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: requested, or implied by a warper."""
        return (
            self.do_sample
            or self.temperature not in (0.0, 1.0)
            or self.top_k != 0
            or 0.0 < self.top_p < 1.0
            or 0.0 < self.typical_p < 1.0
        )


@dataclass(frozen=True, slots=True)
class StoppingParameters:
    """When a sequence ends. For the first `min_new_tokens` tokens, EOS is masked and stop strings are ignored."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Image:
    """An image part of a prompt, undecoded."""

    data: bytes
    mimetype: str


InputChunk = str | Image


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a shard sees it.

    `blocks` are K/V pages in order of token position; if empty, the shard chooses (warm-up). `num_slots` is the
    number of token slots of the request, prompt + max_new_tokens + speculate - 1; the codec expands both to the wire's
    slot list. `cache_len` leading prompt tokens already have K/V; `chunk_len`, if set, is the
    number of tokens after them in the first prefill. `traceparent`: the parent of the shard's spans, if it is traced.
    """

    id: int
    chunks: tuple[InputChunk, ...]
    truncate: int
    parameters: ChooserParameters
    stopping: StoppingParameters
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    blocks: tuple[int, ...] = ()
    num_slots: int = 0
    cache_len: int = 0
    chunk_len: int | None = None
    adapter_id: str | None = None
    add_special_tokens: bool = True
    traceparent: str | None = None

    @property
    def text(self) -> str:
        """The text chunks joined; image chunks are left out."""
        return "".join(chunk for chunk in self.chunks if isinstance(chunk, str))


@dataclass(frozen=True, slots=True)
class Batch:
    """New requests to prefill. `max_tokens` and `max_blocks` are hints; a shard recomputes its own."""

    id: int
    requests: tuple[Request, ...]
    max_tokens: int = 0
    max_blocks: int = 0

    @property
    def size(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A batch whose state is in the shard.

    `max_tokens` is the token capacity it has reserved; `current_tokens` the tokens of its next forward.
    """

    id: int
    request_ids: tuple[int, ...]
    max_tokens: int
    current_tokens: int = 0

    @property
    def size(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Parallel arrays, one entry per token. `is_special` is empty for prompt tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    texts: tuple[str, ...]
    is_special: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """How a sequence ended. `seed` is set only if sampling was on."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence's output of one step: at least one token, and `generated_text` if it ended on the last of them."""

    request_id: int
    tokens: Tokens
    prefill_tokens: Tokens | None = None
    generated_text: GeneratedText | None = None
    top_tokens: tuple[Tokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a step, in ns. `concat_ns` only if batches were merged."""

    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    concat_ns: int | None = None


class NoDraft(StrEnum):
    """The reason that a token is chosen without a draft while drafts are on, in the order of `DraftCounts.undrafted`.

    prompts: the step computes prompts too. batch: no drafts pay in a batch of this size, or it has too many rows.
    cost: drafts of this request are not expected to pay. no_guess: no draft was found. grammar: it
    allows none of the draft. end: the request ends with this token, or its K/V are computed again after it.
    """

    PROMPTS = "prompts"
    BATCH = "batch"
    COST = "cost"
    NO_GUESS = "no_guess"
    GRAMMAR = "grammar"
    END = "end"


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Tokens of drafts that a step verified, and those it accepted, by their place in the draft.

    undrafted: tokens chosen without a draft since the last report, by `NoDraft`. An extension: a foreign shard leaves
    it all out, and its accepted tokens only show in its generations.
    """

    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    undrafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Reply to Prefill or Decode. `batch` is None when every request in it has stopped."""

    generations: tuple[Generation, ...]
    batch: CachedBatch | None
    timings: Timings = Timings()
    drafts: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Static facts about the loaded model. `dtype` is textual, for example `torch.float16`.

    accepts_schemas: a grammar may be a JSON schema, not only a regex. adapters: those that are loaded. Both are
    extensions, which a foreign shard leaves out.
    """

    requires_padding: bool
    dtype: str
    device_type: str
    window_size: int | None = None
    speculate: int = 0
    support_chunking: bool = False
    use_prefix_caching: bool = False
    attention_impl: str = "flashdecoding"
    block_size: int = 16
    accepts_schemas: bool = False
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """The largest prefill of serving, and the limits in force (None: the shard decides)."""

    batch: Batch
    max_prefill_tokens: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WarmupReply:
    """The measured limits. `max_supported_total_tokens` is None for padded models, which report no cache.

    The byte counts and `backends` (keys `prefill`, `decode`, `reason`, `kernels`, `quantize`, `kv_cache`) are
    extensions; a foreign shard leaves them out.
    """

    max_supported_total_tokens: int | None
    max_input_tokens: int
    max_total_tokens: int
    weight_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    graph_bytes: int | None = None
    backends: Mapping[str, str] = field(default_factory=dict)
