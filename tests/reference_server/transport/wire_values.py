"""Hypothesis strategies for every value that crosses the wire, within what the wire can carry."""

from hypothesis import strategies as st

from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    DraftCounts,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    Image,
    ModelInfo,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)

BLOCK_SIZE = 4

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
floats = st.floats(width=32, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

chunks = st.lists(texts | st.builds(Image, data=st.binary(max_size=8), mimetype=texts), min_size=1, max_size=3).map(
    tuple
)

chooser_parameters = st.builds(
    ChooserParameters,
    temperature=floats,
    top_k=uint32,
    top_p=floats,
    typical_p=floats,
    do_sample=st.booleans(),
    seed=uint64,
    repetition_penalty=floats,
    frequency_penalty=floats,
    presence_penalty=floats,
    watermark=st.booleans(),
    grammar=texts,
    grammar_type=st.sampled_from(GrammarType),
    grammar_prefix_chars=uint32,
)

stopping_parameters = st.builds(
    StoppingParameters,
    max_new_tokens=uint32,
    stop_sequences=st.lists(texts, max_size=3).map(tuple),
    ignore_eos_token=st.booleans(),
    min_new_tokens=uint32,
)


@st.composite
def requests(draw):
    blocks = tuple(draw(st.lists(st.integers(0, 2**20), max_size=5)))
    return Request(
        id=draw(uint64),
        chunks=draw(chunks),
        truncate=draw(uint32),
        parameters=draw(chooser_parameters),
        stopping=draw(stopping_parameters),
        prefill_logprobs=draw(st.booleans()),
        top_n_tokens=draw(uint32),
        blocks=blocks,
        num_slots=draw(st.integers(0, len(blocks) * BLOCK_SIZE)),
        cache_len=draw(uint32),
        chunk_len=draw(st.none() | uint32),
        adapter_id=draw(st.none() | texts),
        add_special_tokens=draw(st.booleans()),
        traceparent=draw(st.none() | texts),
    )


batches = st.builds(
    Batch, id=uint64, requests=st.lists(requests(), max_size=2).map(tuple), max_tokens=uint32, max_blocks=uint32
)

cached_batches = st.builds(
    CachedBatch,
    id=uint64,
    request_ids=st.lists(uint64, max_size=4).map(tuple),
    max_tokens=uint32,
    current_tokens=uint32,
)

warmup_requests = st.builds(
    WarmupRequest,
    batch=batches,
    max_prefill_tokens=uint32,
    max_input_tokens=st.none() | st.integers(1, 2**32 - 1),
    max_total_tokens=st.none() | st.integers(1, 2**32 - 1),
)

warmup_replies = st.builds(
    WarmupReply,
    max_supported_total_tokens=st.none() | uint32,
    max_input_tokens=uint32,
    max_total_tokens=uint32,
    weight_bytes=st.none() | uint64,
    prefill_peak_bytes=st.none() | uint64,
    graph_bytes=st.none() | uint64,
    backends=st.dictionaries(texts, texts, max_size=3),
)

model_infos = st.builds(
    ModelInfo,
    requires_padding=st.booleans(),
    dtype=texts,
    device_type=texts,
    window_size=st.none() | uint32,
    speculate=uint32,
    support_chunking=st.booleans(),
    use_prefix_caching=st.booleans(),
    attention_impl=texts,
    block_size=uint32,
)


@st.composite
def tokens(draw):
    count = draw(st.integers(0, 3))

    def column(values):
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    return Tokens(column(uint32), column(floats), column(texts), draw(st.just(()) | st.just((True,) * count)))


generated_texts = st.builds(
    GeneratedText,
    text=texts,
    generated_tokens=uint32,
    finish_reason=st.sampled_from(FinishReason),
    seed=st.none() | uint64,
)

generations = st.builds(
    Generation,
    request_id=uint64,
    tokens=tokens(),
    prefill_tokens=st.none() | tokens(),
    generated_text=st.none() | generated_texts,
    top_tokens=st.lists(tokens(), max_size=2).map(tuple),
)

timings = st.builds(Timings, forward_ns=uint64, decode_ns=uint64, total_ns=uint64, concat_ns=st.none() | uint64)

draft_counts = st.builds(
    lambda places, undrafted: DraftCounts(
        tuple(each[0] for each in places), tuple(each[1] for each in places), tuple(undrafted)
    ),
    st.lists(st.tuples(uint32, uint32), max_size=8),
    st.lists(uint32, max_size=6),
)

step_results = st.builds(
    StepResult,
    generations=st.lists(generations, max_size=3).map(tuple),
    batch=st.none() | cached_batches,
    timings=timings,
    drafts=draft_counts,
)
