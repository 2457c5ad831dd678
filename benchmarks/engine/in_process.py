"""Compare this engine with Transformers, without HTTP; over_http.py compares with HTTP.

    python benchmarks/engine/in_process.py [--quick] [--models preset:tiny-llama ...] [--concurrency 1 8 32]
                                           [--repeats 5] [--peers engine grpc continuous generate] [--json FILE]

Each contender runs in its own process with one compute thread and the same dtype, and waits while another one runs;
rounds are interleaved. One measurement: C distinct prompts of 128 tokens arrive at once and get 64 new tokens each,
end-of-sequence ignored; tokens/s from the first call to the last token. The table has medians with ranges, and the
ratio of this engine to each peer within the same run.

    engine       LocalShard in process, one Prefill and 63 Decodes
    grpc         the same behind text-generation-server on a unix socket
    continuous   transformers' continuous batching (sdpa); starting its manager is not timed
    generate     transformers' generate, one prompt after the other; only C = 1
"""

import argparse
import asyncio
import functools
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

PROMPT_TOKENS = 128
NEW_TOKENS = 64
DTYPE: Literal["bfloat16"] = "bfloat16"
PEERS = ("engine", "grpc", "continuous", "generate")
PREFILL_TOKENS = 4096


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["preset:tiny-llama", "preset:llama-125m"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny-llama, C of 1 and 8, three repeats")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    if args.quick:
        args.models, args.concurrency, args.repeats = ["preset:tiny-llama"], [1, 8], 3
    rates = {}
    for model in args.models:
        rates[model] = measure(model, args.peers, args.concurrency, args.repeats)
        print(table(model, rates[model]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "tokens_per_s": flat(rates)}, indent=1))


Rates = dict[tuple[str, int], list[float]]


def measure(model: str, peers: Sequence[str], concurrency: Sequence[int], repeats: int) -> Rates:
    """Tokens/s of each (peer, concurrency), one value per repeat; the first round is not counted."""
    workers = {peer: ContenderProcess(peer, model) for peer in peers}
    rates: Rates = {}
    try:
        for repeat in range(repeats + 1):
            for rows in concurrency:
                for peer, worker in workers.items():
                    if peer == "generate" and rows > 1:
                        continue
                    rate = worker.run(rows, seed=repeat)
                    if repeat > 0:
                        rates.setdefault((peer, rows), []).append(rate)
                    print(f"{model} round {repeat} C={rows} {peer}: {rate:.1f} tokens/s", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.close()
    return rates


def table(model: str, rates: Rates) -> str:
    lines = [
        f"\n{model}, {DTYPE}, 1 compute thread each, prompt {PROMPT_TOKENS}, output {NEW_TOKENS} forced; "
        f"{machine()}; tokens/s, median (range)"
    ]
    for (peer, rows), values in sorted(rates.items(), key=lambda item: (item[0][1], PEERS.index(item[0][0]))):
        median = statistics.median(values)
        own = rates.get(("engine", rows))
        # Rounds are interleaved, so ratios are computed per round.
        pairs = zip(own, values, strict=True) if own and peer != "engine" else ()
        ratios = [ours / theirs for ours, theirs in pairs]
        ratio = f"   engine is {statistics.median(ratios):.2f} x" if ratios else ""
        lines.append(
            f"  C={rows:<3} {peer:<11}{median:>10.1f}  ({min(values):.1f} - {max(values):.1f}, n={len(values)}){ratio}"
        )
    return "\n".join(lines)


def machine() -> str:
    import torch
    import transformers

    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {processor}"


def flat(rates: dict[str, Rates]) -> list[dict[str, Any]]:
    return [
        {"model": model, "peer": peer, "concurrency": rows, "values": values}
        for model, measured in rates.items()
        for (peer, rows), values in measured.items()
    ]


class ContenderProcess:
    """The process of a contender; requests and answers are lines of JSON."""

    def __init__(
        self,
        peer: str,
        model: str,
        *,
        interpreter: str = sys.executable,
        script: Path = Path(__file__),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [interpreter, str(script), "worker", peer, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid = self._process.pid
        self._answer()

    def run(self, rows: int, seed: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ")
        raise RuntimeError(f"a contender ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(peer: str, model: str) -> None:
    """The main function of a contender's process. Large packages are imported only in this process."""
    import torch

    torch.set_num_threads(1)
    contenders: dict[str, Callable[[str], Any]] = {
        "engine": in_process,
        "grpc": over_grpc,
        "continuous": continuous_batching,
        "generate": plain_generate,
    }
    with asyncio.Runner() as runner:
        runner.run(answer(contenders[peer](model)))


async def answer(contender: Any) -> None:
    async for run_round in contender:
        print("answer ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            started, num_tokens = await run_round(request["rows"], request["seed"])
            elapsed = time.perf_counter() - started
            assert num_tokens == request["rows"] * NEW_TOKENS, f"{num_tokens} tokens were generated"
            print("answer", num_tokens / elapsed, flush=True)


async def in_process(model: str) -> Any:
    from reference_server.model_server.calls.local_shard import LocalShard
    from reference_server.model_server.options import EngineOptions

    shard = LocalShard.load(EngineOptions(model, dtype=DTYPE, cpu_memory_gib=2, compute_threads=1))
    yield await shard_load(shard)
    shard.close()


async def over_grpc(model: str) -> Any:
    from reference_server.transport.grpc_channel import GrpcChannel
    from reference_server.transport.remote_shard import RemoteShard

    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/shard"
        command = [sys.executable, "-m", "reference_server.model_server.cli", "serve", model, "--uds-path", socket]
        command += ["--dtype", DTYPE, "--cpu-memory-gib", "2", "--compute-threads", "1"]
        server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        try:
            while not await asyncio.to_thread(Path(f"{socket}-0").exists):
                assert server.returncode is None, "the server did not start"
                await asyncio.sleep(0.1)
            shard = RemoteShard(await GrpcChannel.open(f"{socket}-0"))
            yield await shard_load(shard)
            await shard.close()
        finally:
            server.terminate()
            await server.wait()


async def shard_load(shard: Any) -> Any:
    """Warm up a shard in the way of the router; returns a function that runs one round."""
    from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest

    def request(id_: int, text: str, tokens: int, new_tokens: int, blocks: tuple[int, ...] = ()) -> Request:
        stopping = StoppingParameters(new_tokens, ignore_eos_token=True)
        num_slots = tokens + new_tokens - 1
        return Request(id_, (text,), tokens, ChooserParameters(), stopping, blocks=blocks, num_slots=num_slots)

    warmup = request(0, "_test " * PREFILL_TOKENS, PREFILL_TOKENS, 1)
    await shard.warmup(WarmupRequest(Batch(0, (warmup,)), PREFILL_TOKENS))
    blocks_each = -(-(PROMPT_TOKENS + NEW_TOKENS - 1) // 16)

    async def run_round(rows: int, seed: int) -> tuple[float, int]:
        requests = tuple(
            request(
                id_, text, PROMPT_TOKENS, NEW_TOKENS, tuple(range(1 + id_ * blocks_each, 1 + (id_ + 1) * blocks_each))
            )
            for id_, text in enumerate(texts(rows, seed))
        )
        started = time.perf_counter()
        result = await shard.prefill(Batch(1, requests))
        num_tokens = len(result.generations)
        while result.batch is not None:
            result = await shard.decode([result.batch])
            num_tokens += len(result.generations)
        return started, num_tokens

    return run_round


def texts(rows: int, seed: int) -> list[str]:
    """Distinct prompts of more than PROMPT_TOKENS tokens; only the last PROMPT_TOKENS are used."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(500)]
    return [" ".join(rng.choices(words, k=2 * PROMPT_TOKENS)) for _ in range(rows)]


def load_transformers(model: str) -> tuple[Any, Callable[[int, int], list[list[int]]]]:
    """Transformers' own model with the same weights, and a function that returns the prompts as token ids."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from reference_server.model_server.distributed import RankGroup
    from reference_server.model_server.models import loader
    from reference_server.model_server.options import EngineOptions
    from reference_server.tokenizer import load_tokenizer

    options = EngineOptions(model, dtype=DTYPE)
    files = loader.locate(options)
    weights = loader.load(options, files, RankGroup()).model.state_dict()
    config = AutoConfig.from_pretrained(files.directory)
    make = functools.partial(AutoModelForCausalLM.from_config, config, dtype=getattr(torch, DTYPE))
    try:
        peer = make(attn_implementation="sdpa").eval()
    except ValueError:
        # Some models have no other implementation: Bloom.
        peer = make(attn_implementation="eager").eval()
    peer.load_state_dict(weights)
    tokenizer = load_tokenizer(files.tokenizer_directory)
    return peer, lambda rows, seed: [tokenizer.encode(text, True)[-PROMPT_TOKENS:] for text in texts(rows, seed)]


async def plain_generate(model: str) -> Any:
    import torch

    peer, prompts = load_transformers(model)

    async def run_round(rows: int, seed: int) -> tuple[float, int]:
        ids = [torch.tensor([prompt]) for prompt in prompts(rows, seed)]
        started = time.perf_counter()
        num_tokens = 0
        with torch.inference_mode():
            for prompt in ids:
                output = peer.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    pad_token_id=0,
                )
                num_tokens += output.shape[1] - prompt.shape[1]
        return started, num_tokens

    yield run_round


async def continuous_batching(model: str) -> Any:
    import logging

    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    peer, prompts = load_transformers(model)
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # On a CPU the size of the K/V cache must be set.
    batching = ContinuousBatchingConfig(page_size=256, num_blocks=64, max_batch_tokens=PREFILL_TOKENS)

    async def run_round(rows: int, seed: int) -> tuple[float, int]:
        ids = prompts(rows, seed)
        manager = peer.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        manager.start()
        started = time.perf_counter()
        try:
            for prompt in ids:
                manager.add_request(prompt, max_new_tokens=NEW_TOKENS)
            num_tokens = finished = 0
            while finished < rows:
                result = manager.get_result(timeout=120)
                if result is not None and result.is_finished():
                    finished += 1
                    num_tokens += len(result.generated_tokens)
            ended = time.perf_counter()
        finally:
            manager.stop(block=True)
        # The time to stop the manager is not counted.
        return started + time.perf_counter() - ended, num_tokens

    yield run_round


if __name__ == "__main__":
    main()
