"""Readers of untrusted bytes, each with valid examples and the errors that it may raise."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError
from safetensors.torch import save

from loadgen.config.bench_config import BenchConfig
from loadgen.config.parsing import load
from loadgen.errors import UsageError
from loadgen.workloads.lengths import read_pairs
from loadgen.workloads.prompts.prompts_file import Columns, read_prompts
from loadgen.workloads.traces import READERS
from reference_server.configuration import settings
from reference_server.configuration.config import ServerConfig
from reference_server.errors import ArgumentError, ShardError, StartupError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupRequest,
)
from reference_server.model_server.weights.checkpoint import open_weights
from reference_server.router.decoder import MalformedJsonError, decode_json
from reference_server.transport.codec import WireCodec
from reference_server.transport.link import HELLO, HELLO_KIND, METHODS, FrameBuffer, FrameError, pack
from reference_server.transport.wire_calls import WIRE_CALLS
from reference_server.transport.wire_schema import load_schema
from reports.run_schema import RequestRecord, Status
from reports.run_store import REQUESTS, JsonlWriter, RunDirectoryError, RunManifest, write_client, write_manifest
from reports.saved_run import load_run
from tuner.config import TuneConfig
from tuner.trial.outcome import TrialResult, parse_result

BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """A reader. `read` takes damaged bytes and an empty folder, and either returns or raises one of `refusals`."""

    name: str
    examples: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...]


def all_targets(folder: Path) -> dict[str, FuzzTarget]:
    """Every target by name. Files for the examples are written into the folder."""
    found = [*frames(), *run_directories(folder), *toml_files(), *traces(), *documents()]
    return {target.name: target for target in found}


def frames() -> list[FuzzTarget]:
    """Messages between router and model server, in both schemas."""
    parameters = ChooserParameters(1.0, 5, 0.9, 1.0, True, 7, 1.0, 0.0, 0.0, False, "a+", GrammarType.REGEX)
    request = Request(1, ("hello",), 100, parameters, StoppingParameters(8, ("x",)), blocks=(1, 2), num_slots=8)
    batch, cached = Batch(1, (request,), 64, 4), CachedBatch(1, (1, 2), 64, 9)
    tokens = Tokens((5, 6), (-0.5, -1.0), ("a", "b"), (False, True))
    text = GeneratedText("ab", 2, FinishReason.LENGTH, 7)
    step = StepResult((Generation(1, tokens, tokens, text, (tokens,)),), cached, Timings(1, 2, 3))
    found = []
    for version in ("v2", "v3"):
        codec = WireCodec(load_schema(version))
        coded = {
            "prefill": (codec.encode_prefill_request(batch, cached, BLOCK_SIZE), codec.decode_prefill_request),
            "decode": (codec.encode_decode_request([cached]), codec.decode_decode_request),
            "warmup": (
                codec.encode_warmup_request(WarmupRequest(batch, 64, 32, 64), BLOCK_SIZE),
                codec.decode_warmup_request,
            ),
            "reply": (codec.encode_step(step, "PrefillResponse"), codec.decode_step),
        }
        for kind, (message, decode) in coded.items():
            found.append(
                FuzzTarget(
                    f"frame_{version}_{kind}",
                    (message.SerializeToString(),),
                    _decoding(type(message), decode),
                    (DecodeError, ShardError),
                )
            )
    return [*found, link_stream(batch, cached)]


def link_stream(batch: Batch, cached: CachedBatch) -> FuzzTarget:
    """The bytes that a shard reads from a router: a hello and two calls."""
    schema = load_schema("v3")
    codec = WireCodec(schema)
    kinds = {name: kind for kind, name in METHODS.items()}
    prefill = codec.encode_prefill_request(batch, None, BLOCK_SIZE).SerializeToString()
    decode = codec.encode_decode_request([cached]).SerializeToString()
    stream = pack(HELLO_KIND, HELLO) + pack(kinds["Prefill"], prefill) + pack(kinds["Decode"], decode)

    def read(data: bytes, _: Path) -> object:
        buffer, requests, has_hello = FrameBuffer(), [], False
        for start in range(0, len(data), 7):
            buffer.feed(data[start : start + 7])
            while (frame := buffer.next_frame()) is not None:
                kind, payload = frame
                if not has_hello:
                    buffer.accept_hello(kind, payload)
                    has_hello = True
                elif kind in METHODS:
                    request = schema.methods[METHODS[kind]].request.FromString(payload)
                    requests.append(WIRE_CALLS[METHODS[kind]].arguments(codec, request))
                else:
                    raise FrameError(f"a frame of the unknown kind {kind}")
        return requests

    return FuzzTarget("frame_link", (stream,), read, (FrameError, DecodeError, ShardError))


def _decoding(message: Any, decode: Callable[[Any], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: decode(message.FromString(data))


def run_directories(folder: Path) -> list[FuzzTarget]:
    """The files of a run: one of them is damaged, the others are valid."""
    whole = folder / "whole"
    whole.mkdir()
    write_manifest(whole, RunManifest("r1"))
    record = RequestRecord(run_id="r1", request_id="q", t_sent_ns=1, t_end_ns=9, status=Status.OK, output_tokens=4)
    with JsonlWriter(whole / f"{REQUESTS}.jsonl") as writer:
        for _ in range(3):
            writer.write(asdict(record))
    write_client(whole, {"write_errors": 0, "workers": []})

    def reading(name: str) -> Callable[[bytes, Path], object]:
        def read(data: bytes, directory: Path) -> object:
            shutil.copytree(whole, directory, dirs_exist_ok=True)
            (directory / name).write_bytes(data)
            return list(load_run(directory).records)

        return read

    return [
        FuzzTarget(f"run_directory_{path.stem}", (path.read_bytes(),), reading(path.name), (RunDirectoryError,))
        for path in sorted(whole.iterdir())
    ]


def toml_files() -> list[FuzzTarget]:
    """Configurations of a load, of a study and of the server."""
    bench = (
        b'mode = "poisson"\nrate = 3.5\nduration = "10s"\ninput_tokens = "uniform:4,9"\nslo = ["ttft_p95_ms < 500"]\n'
    )
    study = (
        b'[study]\nname = "s"\ntrials = 8\n[server]\nmodel_id = "preset:tiny-llama"\n'
        b"fixed = { max_input_tokens = 512 }\n"
        b'[load]\nconcurrency = 4\n[objective]\n[[objective.limit]]\nmetric = "ttft_p95_ms"\nmax = 500.0\n'
        b'[param.max_batch_prefill_tokens]\ntype = "int"\nlow = 64\nhigh = 4096\n'
        b'log = true\nwhen = "prefill_chunking"\n'
        b"[[forbid]]\nif = \"max_batch_prefill_tokens > 64 and quantize == 'eetq'\"\n"
    )
    server = (
        b'model_id = "preset:tiny-llama"\nport = 3000\nmax_input_tokens = 512\n'
        b"prefill_chunking = false\ncuda_graphs = [1, 2]\n"
    )

    def write(data: bytes, folder: Path) -> Path:
        path = folder / "config.toml"
        path.write_bytes(data)
        return path

    def read_server(data: bytes, folder: Path) -> object:
        """Read the settings; the SystemExit of the launcher becomes an ArgumentError."""
        with contextlib.redirect_stderr(io.StringIO()) as message:
            try:
                return settings.load(ServerConfig, ["--config-file", str(write(data, folder))], {})
            except SystemExit:
                raise ArgumentError(message.getvalue()) from None

    return [
        FuzzTarget("toml_load", (bench,), lambda data, at: load(BenchConfig, {}, write(data, at)), (UsageError,)),
        FuzzTarget("toml_study", (study,), lambda data, at: load(TuneConfig, {}, write(data, at)), (UsageError,)),
        FuzzTarget("toml_server", (server,), read_server, (ArgumentError,)),
    ]


def traces() -> list[FuzzTarget]:
    """Files of a load: traces, prompts, pairs of lengths."""
    mooncake = b"".join(
        b'{"timestamp": %d, "input_length": 600, "output_length": 20, "hash_ids": [1, %d]}\n' % (27 * n, n)
        for n in range(4)
    )
    examples = {
        "azure_llm": b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
        b"2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.03,3180,8\n",
        "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        b"5,ChatGPT,472,18,490,Conversation log\n",
        "mooncake": mooncake,
    }

    def reading(read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
        def from_file(data: bytes, folder: Path) -> object:
            (folder / "file").write_bytes(data)
            return read(folder / "file")

        return from_file

    found = [
        FuzzTarget(f"trace_{name}", (content,), reading(READERS[name]), (UsageError,))
        for name, content in examples.items()
    ]
    prompts = b'{"prompt": "one", "output_tokens": 4}\n{"prompt": "two", "output_tokens": 5}\n'
    pairs = b"12,4\n600,20\n"
    columns = Columns("prompt", "output_tokens")
    return [
        *found,
        FuzzTarget("trace_prompts", (prompts,), reading(lambda path: read_prompts(path, columns)), (UsageError,)),
        FuzzTarget("trace_pairs", (pairs,), reading(read_pairs), (UsageError, ValueError)),
    ]


def documents() -> list[FuzzTarget]:
    """The body of a request, a result in a study's storage, a checkpoint."""
    body = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 5, "stop": ["x"], "seed": 3}}).encode()
    result = json.dumps(asdict(TrialResult(3, {"quantize": "eetq"}, "measured", value=4.5, run="run"))).encode()
    weights = save({"a": torch.ones(2, 3), "b": torch.ones(1)}, {"format": "pt"})

    def read_weights(data: bytes, folder: Path) -> object:
        path = folder / "model.safetensors"
        path.write_bytes(data)
        file = open_weights(path)
        return [file.read(name, None) for name in file.shapes]

    return [
        FuzzTarget("json_body", (body,), lambda data, _: decode_json(data), (MalformedJsonError,)),
        FuzzTarget("study_result", (result,), lambda data, _: parse_result(data), (ValueError,)),
        FuzzTarget("checkpoint", (weights,), read_weights, (StartupError,)),
    ]
