"""Transformers with a minimal HTTP server for TGI's `/generate_stream`: a peer of benchmarks/engine/over_http.py.

    python -m benchmarks.peers.transformers_server generate|continuous MODEL --port PORT
    python -m benchmarks.peers.transformers_server save MODEL DIRECTORY        (weights and tokenizer for other peers)

`generate` runs requests one after the other with `model.generate`, `continuous` with Transformers' continuous batching.
"""

import argparse
import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.in_process import PREFILL_TOKENS, load_transformers

OnToken = Callable[[int], None]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("generate", "continuous", "save"))
    parser.add_argument("model")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    model, _ = load_transformers(args.model)
    if args.mode == "save":
        save(model, args.model, args.directory)
        return
    start = one_by_one(model, args.threads) if args.mode == "generate" else continuous_batching(model)
    asyncio.run(serve(args.model, start, args.port))


def save(model: Any, model_id: str, directory: Path) -> None:
    """Save model and tokenizer for other servers."""
    from reference_server.model_server.models import loader
    from reference_server.model_server.options import EngineOptions

    model.save_pretrained(directory)
    for path in loader.locate(EngineOptions(model_id)).tokenizer_directory.glob("*.json"):
        shutil.copy(path, directory)


async def serve(model_id: str, start: Callable[[list[int], int, OnToken], None], port: int) -> None:
    from reference_server.model_server.models import loader
    from reference_server.model_server.options import EngineOptions
    from reference_server.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(loader.locate(EngineOptions(model_id)).tokenizer_directory)
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
        )
        writer.write(HEAD)
        if length:
            request = json.loads(await reader.readexactly(length))
            parameters = request["parameters"]
            ids = tokenizer.encode(request["inputs"], True)[-parameters["truncate"] :]
            tokens: asyncio.Queue[int] = asyncio.Queue()

            def put(id_: int, tokens: asyncio.Queue[int] = tokens) -> None:
                loop.call_soon_threadsafe(tokens.put_nowait, id_)

            start(ids, parameters["max_new_tokens"], put)
            for _ in range(parameters["max_new_tokens"]):
                id_ = await tokens.get()
                event = {"token": {"id": id_, "text": tokenizer.decode([id_])}}
                writer.write(b"data:" + json.dumps(event).encode() + b"\n\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


def one_by_one(model: Any, threads: int) -> Callable[[list[int], int, OnToken], None]:
    import queue

    import torch

    waiting: queue.Queue[tuple[list[int], int, OnToken]] = queue.Queue()

    class Streamer:
        """Receives the prompt, then each generated token."""

        def __init__(self, on_token: OnToken) -> None:
            self._on_token = on_token
            self._is_prompt = True

        def put(self, ids: Any) -> None:
            if self._is_prompt:
                self._is_prompt = False
                return
            self._on_token(int(ids.reshape(-1)[0]))

        def end(self) -> None:
            pass

    def run() -> None:
        torch.set_num_threads(threads)
        while True:
            ids, new_tokens, on_token = waiting.get()
            prompt = torch.tensor([ids])
            with torch.inference_mode():
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    pad_token_id=0,
                    streamer=Streamer(on_token),
                )

    threading.Thread(target=run, daemon=True).start()
    return lambda ids, new_tokens, on_token: waiting.put((ids, new_tokens, on_token))


def continuous_batching(model: Any) -> Callable[[list[int], int, OnToken], None]:
    import logging

    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # On a CPU the size of the K/V cache must be set.
    batching = ContinuousBatchingConfig(page_size=256, num_blocks=64, max_batch_tokens=PREFILL_TOKENS)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    sent: dict[str, int] = {}
    listeners: dict[str, OnToken] = {}

    def run() -> None:
        while True:
            result = manager.get_result(timeout=1)
            if result is None:
                continue
            new = result.generated_tokens[sent[result.request_id] :]
            sent[result.request_id] += len(new)
            for id_ in new:
                listeners[result.request_id](int(id_))

    def start(ids: list[int], new_tokens: int, on_token: OnToken) -> None:
        name = f"request-{len(sent)}"
        sent[name], listeners[name] = 0, on_token
        manager.add_request(ids, request_id=name, max_new_tokens=new_tokens, streaming=True)

    threading.Thread(target=run, daemon=True).start()
    return start


if __name__ == "__main__":
    main()
