"""llama.cpp with a minimal HTTP server: a peer of benchmarks/engine/over_http.py, with its own Python environment.

    python -m benchmarks.peers.llama_server MODEL_DIRECTORY --port PORT --threads 1

A Llama saved by Transformers is converted once to bfloat16 GGUF in the same directory. Requests are batched like in
llama.cpp's own server: each is a sequence of one context, prompts join between steps, and decoding is greedy. The
server of `llama-cpp-python` runs one request at a time, so it is not usable for a comparison at higher concurrency.
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

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

from benchmarks.peers.gguf_file import write_gguf

MAX_SEQUENCES = 32
MAX_TOKENS = 256
BATCH_TOKENS = 4096
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


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
    """One llama.cpp context. Only the thread of `run` uses it."""

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
        """Run requests from `waiting`; never returns."""
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
