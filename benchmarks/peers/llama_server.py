"""llama.cpp with a minimal HTTP server: a peer of benchmarks/engine/over_http.py, with its own Python environment.

    python benchmarks/peers/llama_server.py MODEL_DIRECTORY --port PORT --threads 1

A Llama saved by Transformers is converted once to bfloat16 GGUF beside its weights. Requests are batched like in
llama.cpp's own server: each is a sequence of one context, prompts join between steps, decoding is greedy. The server of
`llama-cpp-python` runs one request at a time, so it cannot be compared at higher concurrency.
"""

import argparse
import asyncio
import ctypes
import functools
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np

MAX_SEQUENCES = 32
MAX_TOKENS = 256
BATCH_TOKENS = 4096
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    path = args.directory / "model.gguf"
    if not path.is_file():
        write_gguf(args.directory, path)
    engine = LlamaEngine(path, args.threads)
    threading.Thread(target=engine.run, daemon=True).start()
    asyncio.run(serve(engine, args.port))


def write_gguf(directory: Path, path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama can be converted to GGUF, not {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(directory / "model.safetensors"):
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            weight = pairs_together(weight, heads if ".q_proj" in name else kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
            continue
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def tensors(path: Path) -> list[tuple[str, Any]]:
    """Name and float32 values of every bfloat16 tensor of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, last = entry["data_offsets"]
        bits = np.frombuffer(content[start + first : start + last], np.uint16).astype(np.uint32) << 16
        found.append((name, bits.view(np.float32).reshape(entry["shape"])))
    return found


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{leaf}"


def pairs_together(weight: Any, heads: int) -> Any:
    """Reorder rows: llama.cpp rotates neighbouring elements of a head, Transformers those half a head apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


@dataclass
class LlamaRequest:
    """One request. on_token: called in the engine's thread for each new token."""

    prompt: list[int]
    left: int
    on_token: Callable[[], object]
    sequence: int = -1
    position: int = 0
    newest: int = -1


class LlamaEngine:
    """One llama.cpp context, used by one thread only."""

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = MAX_SEQUENCES * MAX_TOKENS, BATCH_TOKENS, MAX_SEQUENCES
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, settings)
        assert self._context, f"llama.cpp did not load {path}"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.waiting: queue.Queue[LlamaRequest] = queue.Queue()

    def run(self) -> None:
        free, running = list(range(MAX_SEQUENCES)), list[LlamaRequest]()
        while True:
            while free and (not running or not self.waiting.empty()):
                request = self.waiting.get()
                request.sequence = free.pop()
                running.append(request)
            for request in self._step(running):
                llama_cpp.llama_memory_seq_rm(self._memory, request.sequence, -1, -1)
                free.append(request.sequence)
                running.remove(request)

    def _step(self, running: list[LlamaRequest]) -> list[LlamaRequest]:
        """Generate one token for each request that fits the batch; returns finished requests."""
        rows, self._batch.n_tokens = [], 0
        for request in running:
            tokens = request.prompt if request.newest < 0 else [request.newest]
            if self._batch.n_tokens + len(tokens) > BATCH_TOKENS:
                continue
            for place, token in enumerate(tokens, 1):
                self._add(request, token, is_last=place == len(tokens))
            rows.append((request, self._batch.n_tokens - 1))
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        for request, row in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            request.newest = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            request.left -= 1
            request.on_token()
        return [request for request, _ in rows if request.left == 0]

    def _add(self, request: LlamaRequest, token: int, is_last: bool) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, request.position, 1
        batch.seq_id[place][0], batch.logits[place] = request.sequence, ctypes.c_int8(is_last)
        batch.n_tokens += 1
        request.position += 1


async def serve(engine: LlamaEngine, port: int) -> None:
    """Serve /health, and the part of OpenAI's streamed completions that benchmarks/peers/http_load.py uses."""
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            length = int(head.partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            events: asyncio.Queue[None] = asyncio.Queue()
            on_token = functools.partial(loop.call_soon_threadsafe, events.put_nowait, None)
            engine.waiting.put(LlamaRequest(body["prompt"], body["max_tokens"], on_token))
            writer.write(HEAD)
            for _ in range(body["max_tokens"]):
                await events.get()
                writer.write(b'data: {"choices":[{}]}\n\n')
            writer.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % body["max_tokens"])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    main()
