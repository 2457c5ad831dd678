"""Cost of grammars: microseconds per step and per compilation, and a comparison of libraries on JSON schemas.

    python -m benchmarks.engine.grammar steps [--rows 1 8 32] [--repeats 40] [--json FILE]
    python -m benchmarks.engine.grammar libraries [--vocab 32000] [--json FILE]

`steps` times the choice of tokens over 32,000 logits with a JSON grammar on no row, one row and all rows. It is
interleaved with a decode step of preset:llama-125m, so that noise affects both. `libraries` runs the same random texts
through llguidance, and through outlines-core and xgrammar if they are installed: time to the first mask, time per mask,
accepted texts.
"""

import argparse
import importlib.util
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from reference_server.grammars.compile import compile_grammar
from reference_server.messages import Batch, ChooserParameters, Grammar, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.decoding.grammar import Grammars, GrammarState
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import TokenChooser
from reference_server.model_server.engine import Engine
from reference_server.model_server.options import EngineOptions
from reference_server.presets.catalog import PRESETS
from reference_server.tokenizer import load_tokenizer
from tests.support.samples.grammar_samples import sample
from tests.support.samples.schema_suite import SERVED

MODEL_VOCAB = 32_000
MAX_REPEATS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    steps.add_argument("--repeats", type=int, default=40, choices=range(2, MAX_REPEATS), metavar="N")
    libraries = commands.add_parser("libraries")
    libraries.add_argument("--vocab", type=int, default=32_000)
    for command in (steps, libraries):
        command.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure_steps(args) if args.command == "steps" else compare_libraries(args)
    results["machine"] = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(PRESETS[0].tokenizer_directory, MODEL_VOCAB)
    assert tokenizer.eos_id is not None
    grammar = compile_grammar("schema", json.dumps(SERVED["tgi_guidance"]))
    starts = [time_of(lambda: Grammars(tokenizer, {0, 2}).prepare()) for _ in range(3)]
    grammars = Grammars(tokenizer, {tokenizer.eos_id})
    grammars.prepare()
    compiles = [time_of(lambda: grammars.fresh_automaton(grammar)) for _ in range(20)]
    layout_ms, compile_us = min(starts) / 1e6, statistics.median(compiles) / 1e3
    print(f"token table built in {layout_ms:.1f} ms; a grammar compiled in {compile_us:.0f} us")
    table = []
    engine = Engine.load(
        EngineOptions("preset:llama-125m", load_format="dummy", cpu_memory_gib=2, compute_threads=1), 0, 1
    )
    for rows in args.rows:
        decode = DecodeStep(engine, rows)
        choices = {count: Choices(grammars, grammar, rows, count) for count in sorted({0, 1, rows})}
        times: dict[Any, list[int]] = {key: [] for key in ["step", *choices]}
        for _ in range(args.repeats):
            times["step"].append(time_of(decode))
            for count, choose in choices.items():
                times[count].append(time_of(choose))
        # The lower quartile: other load on the machine can only add time.
        us = {key: statistics.quantiles(values)[0] / 1e3 for key, values in times.items()}
        fraction = (us[1] - us[0]) / us["step"]
        choice = ", ".join(f"{us[count]:.0f} us with {count}" for count in choices)
        print(f"{rows:3} rows: step {us['step']:.0f} us; choice {choice} constrained rows; one row adds {fraction:.1%}")
        table.append({"rows": rows, "step_us": us["step"], "choice_us": {str(c): us[c] for c in choices}})
    return {"compile_us": compile_us, "layout_ms": layout_ms, "steps": table}


def time_of(work: Callable[[], object]) -> int:
    started = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - started


class Choices:
    """A choice for every row; the first `num_constrained` rows are inside a JSON text."""

    def __init__(self, grammars: Grammars, grammar: Grammar, num_rows: int, num_constrained: int) -> None:
        self._ids = [[1, 2, 3]] * num_rows
        self._logits = torch.randn(num_rows, MODEL_VOCAB, generator=torch.Generator().manual_seed(1))
        chooser = ChooserParameters(do_sample=True, seed=1)
        self._states = [state_inside_text(grammars, grammar, seed) for seed in range(num_constrained)]
        states = [*self._states, *[None] * (num_rows - num_constrained)]
        self._chooser = TokenChooser(
            [RowParameters(chooser, grammar=state) for state in states], MODEL_VOCAB, {2}, torch.device("cpu")
        )

    def __call__(self) -> None:
        self._chooser.choose(self._logits, self._ids).to_host()


def state_inside_text(grammars: Grammars, grammar: Grammar, seed: int) -> GrammarState:
    """A state after a few tokens, each drawn uniformly from the allowed tokens."""
    state, rng = grammars.state(grammar), random.Random(seed)
    words = np.zeros(state.num_words, np.int32)
    for _ in range(8 + seed % 8):
        state.fill(words)
        state.accept(int(rng.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))))
    return state


class DecodeStep:
    """One decode step of a batch of unconstrained rows."""

    def __init__(self, engine: Engine, rows: int) -> None:
        warm = Request(0, ("word " * 60,), 64, ChooserParameters(), StoppingParameters(1))
        stopping = StoppingParameters(MAX_REPEATS + 2, ignore_eos_token=True)
        with torch.inference_mode():
            engine.warmup(WarmupRequest(Batch(0, (warm,)), 64))
        # Requests without blocks are placed by the shard.
        requests = tuple(
            Request(id_, ("a prompt of some words",), 64, ChooserParameters(), stopping) for id_ in range(rows)
        )
        self._engine = engine
        self._batch = engine.intake.make_batch(Batch(1, requests))
        self()

    def __call__(self) -> None:
        output = self._engine.stepper.step(self._batch)
        assert output.batch is not None
        self._batch = output.batch


class Library(Protocol):
    """The functions of a library that are compared."""

    def start(self, regex: str) -> Any: ...

    def mask(self, state: Any) -> int:
        """Compute the mask of the next token."""
        ...

    def accept(self, state: Any, token: int) -> bool: ...

    def may_end(self, state: Any) -> bool: ...


def compare_libraries(args: argparse.Namespace) -> dict[str, Any]:
    tokens = vocabulary(args.vocab)
    ids = {token: id_ for id_, token in enumerate(tokens)}
    walks = []
    for name, schema in SERVED.items():
        regex = compile_grammar("schema_regex", json.dumps(schema)).text
        walks.append((name, regex, [tokenized(text, ids) for text in sample(regex, seed=3, count=2, max_bytes=400)]))
    results: dict[str, Any] = {"vocab": args.vocab, "schemas": len(walks)}
    for library, make in LIBRARIES.items():
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed")
            continue
        results[library] = walk_all(make(tokens), walks)
        print(library, json.dumps(results[library]))
    return results


def walk_all(library: Library, walks: Sequence[tuple[str, str, list[list[int]]]]) -> dict[str, Any]:
    starts, masks, wrong = [], [], []
    for name, regex, texts in walks:
        started = time.perf_counter_ns()
        try:
            library.mask(library.start(regex))
        except Exception as error:  # each library has its own errors; a failure is a result
            wrong.append(f"{name}: {type(error).__name__}")
            continue
        starts.append(time.perf_counter_ns() - started)
        for text in texts:
            state = library.start(regex)
            for token in text:
                masks.append(time_of(lambda state=state: library.mask(state)))  # type: ignore[misc]
                if not library.accept(state, token):
                    wrong.append(f"{name}: rejects a matching text")
                    break
            else:
                if not library.may_end(state):
                    wrong.append(f"{name}: does not end")
    return {
        "first_mask_ms": spread(starts, 1e6),
        "mask_us": spread(masks, 1e3),
        "wrong": sorted(set(wrong)),
    }


def spread(values: Sequence[int], unit: float) -> dict[str, float]:
    percentiles = np.percentile(values, [50, 99, 100]) / unit
    return dict(zip(("p50", "p99", "max"), [round(float(value), 3) for value in percentiles], strict=True))


def vocabulary(size: int) -> list[bytes]:
    """All single bytes, then random pieces of two to eight characters; the last token is end-of-sequence."""
    rng = random.Random(0)
    letters = 'etaoinshrdlucmfwypvbgkjqxz    0123456789{}[]",:.-_éü日本'
    pieces: dict[bytes, None] = {bytes([value]): None for value in range(256)}
    while len(pieces) < size - 1:
        pieces["".join(rng.choices(letters, k=rng.randint(2, 8))).encode()] = None
    return [*pieces, b"<end>"]


def tokenized(text: str, ids: dict[bytes, int]) -> list[int]:
    """The ids of a text, with the longest matching token at each place."""
    data, found = text.encode(), []
    while data:
        size = next(size for size in range(min(16, len(data)), 0, -1) if data[:size] in ids)
        found.append(ids[data[:size]])
        data = data[size:]
    return found


class LlGuidance:
    def __init__(self, tokens: list[bytes]) -> None:
        import llguidance

        self._library = llguidance
        self._words = np.zeros(-(-len(tokens) // 32), np.int32)

        class TokenList:
            eos_token_id, bos_token_id, special_token_ids = len(tokens) - 1, None, (len(tokens) - 1,)

            def __init__(self) -> None:
                self.tokens, self._ids = tokens, {token: id_ for id_, token in enumerate(tokens)}

            def __call__(self, text: bytes) -> list[int]:
                return tokenized(text.decode(errors="replace"), self._ids)

        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(TokenList()))

    def start(self, regex: str) -> Any:
        matcher = self._library.LLMatcher
        return matcher(self._tokens, matcher.grammar_from_regex(regex), log_level=0)

    def mask(self, state: Any) -> int:
        state.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return 0

    def accept(self, state: Any, token: int) -> bool:
        return bool(state.consume_token(token))

    def may_end(self, state: Any) -> bool:
        return bool(state.is_accepting())


class OutlinesCore:
    def __init__(self, tokens: list[bytes]) -> None:
        import outlines_core

        self._library = outlines_core
        self._vocabulary = outlines_core.Vocabulary(
            len(tokens) - 1, {token: [id_] for id_, token in enumerate(tokens[:-1])}
        )
        self._words = np.zeros(-(-len(tokens) // 32), np.int32)

    def start(self, regex: str) -> Any:
        if getattr(self, "_last", (None,))[0] != regex:
            self._last = regex, self._library.Index(regex, self._vocabulary)
        return self._library.Guide(self._last[1])

    def mask(self, state: Any) -> int:
        state.write_mask_into(self._words.ctypes.data, self._words.size, self._words.itemsize)
        return 0

    def accept(self, state: Any, token: int) -> bool:
        try:
            state.advance(token, return_tokens=False)
        except (ValueError, TypeError):
            return False
        return True

    def may_end(self, state: Any) -> bool:
        return bool(state.is_finished())


class XGrammar:
    def __init__(self, tokens: list[bytes]) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1]
        )
        self._end = len(tokens) - 1
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._words = xgrammar.allocate_token_bitmask(1, len(tokens))

    def start(self, regex: str) -> Any:
        return self._library.GrammarMatcher(self._compiler.compile_regex(regex))

    def mask(self, state: Any) -> int:
        state.fill_next_token_bitmask(self._words)
        return 0

    def accept(self, state: Any, token: int) -> bool:
        return bool(state.accept_token(token))

    def may_end(self, state: Any) -> bool:
        return bool(state.accept_token(self._end))


LIBRARIES: dict[str, Callable[[list[bytes]], Library]] = {
    "llguidance": LlGuidance,
    "outlines_core": OutlinesCore,
    "xgrammar": XGrammar,
}


if __name__ == "__main__":
    raise SystemExit(main())
