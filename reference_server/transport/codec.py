"""`reference_server.messages` to protobuf and back, for either schema.

One codec serves both: fields that a schema lacks are not written and read as defaults. Under v2 a prompt is one string
and the shard places K/V.
"""

from base64 import b64encode
from collections.abc import Sequence
from itertools import chain, cycle, islice

from reference_server.adapter_source import AdapterSource
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    DraftCounts,
    GrammarType,
    Image,
    InputChunk,
    ModelInfo,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    WarmupReply,
    WarmupRequest,
)
from reference_server.transport.generation_messages import decode_generation, encode_generation, member, optional
from reference_server.transport.wire_schema import Message, WireSchema

NO_DRAFTS = DraftCounts()

GRAMMAR_TYPES = dict(enumerate((GrammarType.NONE, GrammarType.JSON, GrammarType.REGEX)))

_GRAMMAR_NUMBERS = {grammar: number for number, grammar in GRAMMAR_TYPES.items()}


def expand_slots(blocks: Sequence[int], num_slots: int, block_size: int) -> list[int]:
    """Number of the K/V slot of each of the first `num_slots` tokens. Fewer blocks than needed, as
    for a sliding window, are reused in turn.

    >>> expand_slots([3, 9], 6, block_size=4)
    [12, 13, 14, 15, 36, 37]
    >>> expand_slots([3], 6, block_size=4)
    [12, 13, 14, 15, 12, 13]
    """
    slots = chain.from_iterable(range(block * block_size, (block + 1) * block_size) for block in cycle(blocks))
    return list(islice(slots, num_slots))


def flatten(chunks: Sequence[InputChunk]) -> str:
    """The prompt as one string, images inlined in TGI's Markdown form."""
    return "".join(
        chunk if isinstance(chunk, str) else f"![](data:{chunk.mimetype};base64,{b64encode(chunk.data).decode()})"
        for chunk in chunks
    )


class WireCodec:
    """`encode_*` return a message of `schema`, `decode_*` read one.

    A value that protobuf cannot encode (an integer out of range, text that is not Unicode) is a ValueError; an unknown
    enum value from the peer is a ShardError.
    """

    def __init__(self, schema: WireSchema) -> None:
        self._messages = schema.messages
        self._fields = {name: frozenset(kind.DESCRIPTOR.fields_by_name) for name, kind in schema.messages.items()}
        self._with_concat = {schema.messages[kind] for kind, fields in self._fields.items() if "concat_ns" in fields}
        self._has_current_tokens = "current_tokens" in self._fields["CachedBatch"]

    def encode_info(self, info: ModelInfo) -> Message:
        return self._make(
            "InfoResponse",
            requires_padding=info.requires_padding,
            dtype=info.dtype,
            device_type=info.device_type,
            window_size=info.window_size,
            speculate=info.speculate,
            support_chunking=info.support_chunking,
            use_prefix_caching=info.use_prefix_caching,
            attention_impl=info.attention_impl,
            block_size=info.block_size,
            accepts_schemas=info.accepts_schemas,
            adapters=info.adapters,
        )

    def decode_info(self, message: Message) -> ModelInfo:
        placement = (
            {
                "support_chunking": message.support_chunking,
                "use_prefix_caching": message.use_prefix_caching,
                "attention_impl": message.attention_impl,
                "block_size": message.block_size,
            }
            if "block_size" in self._fields["InfoResponse"]
            else {}
        )
        return ModelInfo(
            requires_padding=message.requires_padding,
            dtype=message.dtype,
            device_type=message.device_type,
            window_size=message.window_size if message.HasField("window_size") else None,
            speculate=message.speculate,
            accepts_schemas=message.accepts_schemas,
            adapters=tuple(message.adapters) if "adapters" in self._fields["InfoResponse"] else (),
            **placement,
        )

    def encode_adapter(self, source: AdapterSource) -> Message:
        return self._make(
            "LoadAdapterRequest", adapter_id=source.name, location=source.location, revision=source.revision
        )

    def decode_adapter(self, message: Message) -> AdapterSource:
        return AdapterSource(message.adapter_id, message.location, optional(message, "revision"))

    def encode_warmup_request(self, request: WarmupRequest, block_size: int) -> Message:
        return self._make(
            "WarmupRequest",
            batch=self._encode_batch(request.batch, block_size),
            max_input_length=request.max_input_tokens,
            max_input_tokens=request.max_input_tokens,
            max_prefill_tokens=request.max_prefill_tokens,
            max_total_tokens=request.max_total_tokens,
        )

    def decode_warmup_request(self, message: Message) -> WarmupRequest:
        max_input = message.max_input_tokens if hasattr(message, "max_input_tokens") else message.max_input_length
        return WarmupRequest(
            batch=self._decode_batch(message.batch),
            max_prefill_tokens=message.max_prefill_tokens,
            max_input_tokens=max_input or None,
            max_total_tokens=message.max_total_tokens or None,
        )

    def encode_warmup_reply(self, reply: WarmupReply) -> Message:
        return self._make(
            "WarmupResponse",
            max_supported_total_tokens=reply.max_supported_total_tokens,
            max_input_tokens=reply.max_input_tokens,
            max_total_tokens=reply.max_total_tokens,
            weight_bytes=reply.weight_bytes,
            prefill_peak_bytes=reply.prefill_peak_bytes,
            graph_bytes=reply.graph_bytes,
            backends=dict(reply.backends),
        )

    def decode_warmup_reply(self, message: Message, request: WarmupRequest) -> WarmupReply:
        """Read a reply. Under v2 it lacks the limits in force, which are those of `request`."""
        return WarmupReply(
            max_supported_total_tokens=optional(message, "max_supported_total_tokens"),
            max_input_tokens=getattr(message, "max_input_tokens", request.max_input_tokens or 0),
            max_total_tokens=getattr(message, "max_total_tokens", request.max_total_tokens or 0),
            weight_bytes=optional(message, "weight_bytes"),
            prefill_peak_bytes=optional(message, "prefill_peak_bytes"),
            graph_bytes=optional(message, "graph_bytes"),
            backends=dict(message.backends),
        )

    def encode_prefill_request(self, batch: Batch, cached: CachedBatch | None, block_size: int) -> Message:
        return self._make(
            "PrefillRequest",
            batch=self._encode_batch(batch, block_size),
            cached_batch=None if cached is None else self.encode_cached(cached),
        )

    def decode_prefill_request(self, message: Message) -> tuple[Batch, CachedBatch | None]:
        has_cached = "cached_batch" in self._fields["PrefillRequest"] and message.HasField("cached_batch")
        cached = self.decode_cached(message.cached_batch) if has_cached else None
        return self._decode_batch(message.batch), cached

    def encode_decode_request(self, batches: Sequence[CachedBatch]) -> Message:
        return self._messages["DecodeRequest"](batches=[self.encode_cached(batch) for batch in batches])

    def decode_decode_request(self, message: Message) -> list[CachedBatch]:
        return [self.decode_cached(batch) for batch in message.batches]

    def encode_cached(self, batch: CachedBatch) -> Message:
        message = self._messages["CachedBatch"]()
        self._write_cached(batch, message)
        return message

    def _write_cached(self, batch: CachedBatch, message: Message) -> None:
        message.id = batch.id
        message.request_ids.extend(batch.request_ids)
        message.size = len(batch.request_ids)
        message.max_tokens = batch.max_tokens
        if self._has_current_tokens:
            message.current_tokens = batch.current_tokens

    def decode_cached(self, message: Message) -> CachedBatch:
        return CachedBatch(
            message.id,
            tuple(message.request_ids[:]),
            message.max_tokens,
            message.current_tokens if self._has_current_tokens else 0,
        )

    def encode_step(self, result: StepResult, kind: str) -> Message:
        """`kind` is PrefillResponse or DecodeResponse."""
        timings = result.timings
        message = self._messages[kind](
            forward_ns=timings.forward_ns, decode_ns=timings.decode_ns, total_ns=timings.total_ns
        )
        if result.batch is not None:
            self._write_cached(result.batch, message.batch)
        if timings.concat_ns is not None and type(message) in self._with_concat:
            message.concat_ns = timings.concat_ns
        if result.drafts.proposed:
            message.drafts_proposed.extend(result.drafts.proposed)
            message.drafts_accepted.extend(result.drafts.accepted)
        if result.drafts.undrafted:
            message.undrafted.extend(result.drafts.undrafted)
        add = message.generations.add
        for generation in result.generations:
            encode_generation(generation, add())
        return message

    def decode_step(self, message: Message) -> StepResult:
        has_concat = type(message) in self._with_concat and message.HasField("concat_ns")
        return StepResult(
            generations=tuple([decode_generation(generation) for generation in message.generations]),
            batch=self.decode_cached(message.batch) if message.HasField("batch") else None,
            timings=Timings(
                forward_ns=message.forward_ns,
                decode_ns=message.decode_ns,
                total_ns=message.total_ns,
                concat_ns=message.concat_ns if has_concat else None,
            ),
            drafts=_decode_drafts(message) if message.drafts_proposed or message.undrafted else NO_DRAFTS,
        )

    def _encode_batch(self, batch: Batch, block_size: int) -> Message:
        return self._make(
            "Batch",
            id=batch.id,
            requests=[self._encode_request(request, block_size) for request in batch.requests],
            size=batch.size,
            max_tokens=batch.max_tokens,
            max_blocks=batch.max_blocks,
        )

    def _decode_batch(self, message: Message) -> Batch:
        return Batch(
            id=message.id,
            requests=tuple(self._decode_request(request) for request in message.requests),
            max_tokens=message.max_tokens,
            max_blocks=getattr(message, "max_blocks", 0),
        )

    def _encode_request(self, request: Request, block_size: int) -> Message:
        message = self._make(
            "Request",
            id=request.id,
            inputs=flatten(request.chunks),
            truncate=request.truncate,
            parameters=self._encode_parameters(request.parameters),
            stopping_parameters=self._encode_stopping(request.stopping),
            prefill_logprobs=request.prefill_logprobs,
            top_n_tokens=request.top_n_tokens,
            adapter_id=request.adapter_id,
            cache_len=request.cache_len,
            add_special_tokens=request.add_special_tokens,
            chunk_len=request.chunk_len,
            traceparent=request.traceparent,
        )
        if "input_chunks" in self._fields["Request"]:
            message.input_chunks.chunks.extend(self._encode_chunk(chunk) for chunk in request.chunks)
            message.blocks.extend(request.blocks)
            message.slots.extend(expand_slots(request.blocks, request.num_slots, block_size))
        return message

    def _decode_request(self, message: Message) -> Request:
        values = {
            "id": message.id,
            "chunks": (message.inputs,),
            "truncate": message.truncate,
            "parameters": _decode_parameters(message.parameters),
            "stopping": _decode_stopping(message.stopping_parameters),
            "prefill_logprobs": message.prefill_logprobs,
            "top_n_tokens": message.top_n_tokens,
            "traceparent": optional(message, "traceparent"),
        }
        if "input_chunks" in self._fields["Request"]:
            chunks = tuple(_decode_chunk(chunk) for chunk in message.input_chunks.chunks)
            values |= {
                "chunks": chunks or (message.inputs,),
                "blocks": tuple(message.blocks),
                "num_slots": len(message.slots),
                "cache_len": message.cache_len,
                "chunk_len": optional(message, "chunk_len"),
                "adapter_id": optional(message, "adapter_id"),
                "add_special_tokens": message.add_special_tokens,
            }
        return Request(**values)

    def _encode_chunk(self, chunk: InputChunk) -> Message:
        if isinstance(chunk, str):
            return self._messages["InputChunk"](text=chunk)
        return self._messages["InputChunk"](image={"data": chunk.data, "mimetype": chunk.mimetype})

    def _encode_parameters(self, parameters: ChooserParameters) -> Message:
        return self._make(
            "NextTokenChooserParameters",
            temperature=parameters.temperature,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            typical_p=parameters.typical_p,
            do_sample=parameters.do_sample,
            seed=parameters.seed,
            repetition_penalty=parameters.repetition_penalty,
            frequency_penalty=parameters.frequency_penalty,
            presence_penalty=parameters.presence_penalty or None,
            watermark=parameters.watermark,
            grammar=parameters.grammar,
            grammar_type=_GRAMMAR_NUMBERS[parameters.grammar_type],
            grammar_prefix_chars=parameters.grammar_prefix_chars or None,
        )

    def _encode_stopping(self, stopping: StoppingParameters) -> Message:
        return self._make(
            "StoppingCriteriaParameters",
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=stopping.stop_sequences,
            ignore_eos_token=stopping.ignore_eos_token,
            min_new_tokens=stopping.min_new_tokens or None,
        )

    def _make(self, kind: str, **values: object) -> Message:
        """A message of the values that are not None and that the schema has."""
        known = self._fields[kind]
        return self._messages[kind](**{k: v for k, v in values.items() if v is not None and k in known})


def _decode_drafts(message: Message) -> DraftCounts:
    return DraftCounts(tuple(message.drafts_proposed), tuple(message.drafts_accepted), tuple(message.undrafted))


def _decode_chunk(message: Message) -> InputChunk:
    if message.WhichOneof("chunk") == "image":
        return Image(message.image.data, message.image.mimetype)
    return str(message.text)


def _decode_parameters(message: Message) -> ChooserParameters:
    return ChooserParameters(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        typical_p=message.typical_p,
        do_sample=message.do_sample,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        watermark=message.watermark,
        grammar=message.grammar,
        grammar_type=member(GRAMMAR_TYPES, message.grammar_type, "grammar type"),
        grammar_prefix_chars=message.grammar_prefix_chars,
    )


def _decode_stopping(message: Message) -> StoppingParameters:
    return StoppingParameters(
        max_new_tokens=message.max_new_tokens,
        stop_sequences=tuple(message.stop_sequences),
        ignore_eos_token=message.ignore_eos_token,
        min_new_tokens=message.min_new_tokens,
    )
