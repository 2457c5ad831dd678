"""Grammars in a batch: allowed tokens, the end of a row, and a failing state, which does not change other rows."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from reference_server.messages import (
    ChooserParameters,
    FinishReason,
    Grammar,
    GrammarType,
    Request,
    StoppingParameters,
)
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.grammar import MAX_CACHED, Grammars, GrammarState
from reference_server.model_server.decoding.grammar_engine import read_resident_bytes
from reference_server.model_server.decoding.logits import LogitsPipeline, RowParameters
from reference_server.model_server.decoding.sampling import TokenChooser
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.generations import Generations
from reference_server.model_server.sequence import Sequence
from reference_server.presets.catalog import PRESETS
from reference_server.tokenizer import FastTokenizer, SlowTokenizer, load_tokenizer

EOS = 4


def byte_level(*words: str, vocab_size: int | None = None) -> FastTokenizer:
    """Ids in order of `words`, of which `</s>` is special; decoding as GPT-2's does."""
    vocab = {word: id_ for id_, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return FastTokenizer(tokenizer, {"eos_token": "</s>"}, vocab_size)


def sentencepiece(*words: str) -> FastTokenizer:
    """As Llama 2's: `▁` is a space and `<0x..>` a byte."""
    vocab = {word: id_ for id_, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=words[0]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["</s>"])
    return FastTokenizer(tokenizer, {"eos_token": "</s>"})


M15 = byte_level("a", "b", "ab", "1", "</s>")


def allowed(state: GrammarState, vocab_size: int = 5) -> list[int]:
    pipeline = LogitsPipeline([row(state)], vocab_size, {EOS}, torch.device("cpu"), Watermark())
    scores = pipeline.process(torch.zeros(1, vocab_size), [[0]], None)
    return [id_ for id_, score in enumerate(scores[0].tolist()) if score == 0]


def row(state: GrammarState | None = None, **more: int) -> RowParameters:
    return RowParameters(ChooserParameters(), grammar=state, **more)


def test_model_server_M15_masks_follow_the_regex():
    state = Grammars(M15, {EOS}).state(Grammar("a+b"))

    assert allowed(state) == [0, 2]
    state.accept(2)
    assert allowed(state) == [EOS]


def test_model_server_M15_a_free_row_stays_unconstrained():
    logits = torch.tensor([[0.0, 0.0, 0.0, 5.0, 0.0]] * 3)
    rows = [row(), row(Grammars(M15, {EOS}).state(Grammar("a+b"))), row()]

    choice = TokenChooser(rows, 5, {EOS}, torch.device("cpu")).choose(logits, [[0]] * 3).to_host()
    alone = TokenChooser([row()], 5, {EOS}, torch.device("cpu")).choose(logits[:1], [[0]]).to_host()

    assert choice.ids == [3, 0, 3]
    assert (choice.logprobs[0], choice.logprobs[2]) == (alone.logprobs[0], alone.logprobs[0])


def test_an_end_comes_only_where_the_grammar_may_end():
    state = Grammars(M15, {EOS}).state(Grammar("(ab)+"))

    seen = []
    for token in (0, 1, 2):
        seen.append(EOS in allowed(state))
        state.accept(token)
    seen.append(EOS in allowed(state))

    assert seen == [False, False, True, True]


def test_every_end_of_sequence_id_of_the_model_ends():
    tokenizer = byte_level("a", "b", "ab", "1", "</s>", "<end>")
    state = Grammars(tokenizer, {4, 5}).state(Grammar("a"))
    state.accept(0)

    assert allowed(state, vocab_size=6) == [4, 5]


def test_the_minimum_length_gives_way_where_only_an_end_is_left():
    state = Grammars(M15, {EOS}).state(Grammar("ab?"))
    chooser = TokenChooser([row(state, prompt_len=1, min_new_tokens=9)], 5, {EOS}, torch.device("cpu"))

    state.accept(0)
    longer = chooser.choose(torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0]]), [[0, 0]]).to_host()
    state.accept(1)
    ended = chooser.choose(torch.zeros(1, 5), [[0, 0, 1]]).to_host()

    assert (longer.ids, ended.ids) == ([1], [EOS])


def test_an_ended_grammar_allows_ends_only_where_ends_are_ignored():
    state = Grammars(M15, {EOS}).state(Grammar("ab"))
    for token in (2, EOS, EOS):
        state.accept(token)

    assert allowed(state) == [EOS]


def test_a_character_may_be_split_over_tokens():
    tokenizer = byte_level("Ã", "©", "é", "x", "</s>", "Ĩ")
    state = Grammars(tokenizer, {EOS}).state(Grammar("[é]+x"))

    # The bytes of é are C3 A9, which byte-level vocabularies write as Ã and ©.
    assert allowed(state, vocab_size=6) == [0]
    state.accept(0)
    assert allowed(state, vocab_size=6) == [1]
    state.accept(1)
    assert allowed(state, vocab_size=6) == [0, 3]


@pytest.mark.parametrize("split", range(7))
def test_a_generation_is_continued_behind_the_text_that_it_had(split: int):
    """The text can be tokenized in any way: the tokens that generated it are no longer known."""
    grammars = Grammars(M15, {EOS}, resident_bytes=lambda: 0)
    walked, text = grammars.state(Grammar("(ab){2}1|a{6}")), "abab1"[:split]
    for letter in text:
        walked.accept("ab?1".index(letter))

    continued = grammars.state(Grammar("(ab){2}1|a{6}"), text)

    assert allowed(continued) == allowed(walked)


def test_hardening_R18_a_schema_is_walked_and_continued_as_a_schema():
    tokenizer = byte_level(*'{}":,ab1', "</s>")
    grammars = Grammars(tokenizer, {8})
    grammar = Grammar('{"properties":{"a":{"$ref":"#"},"b":{"const":1}},"type":"object"}', GrammarType.JSON)
    text = '{"a":{"b":1}'

    walked = grammars.state(grammar)
    for id_ in tokenizer.encode(text, add_special_tokens=False):
        walked.accept(id_)

    assert [tokenizer.decode([id_]) for id_ in allowed(walked, 9)] == ["}", ","]
    assert allowed(grammars.state(grammar, text), 9) == allowed(walked, 9)


@pytest.mark.parametrize(
    "schema", ["{", '{"properties": 5}', '{"properties": {"a": {"not": {}}}, "required": ["a"]}', "x" * 300_000]
)
def test_a_schema_that_another_router_did_not_check_fails_its_row(schema: str):
    state = Grammars(M15, {EOS}).state(Grammar(schema, GrammarType.JSON))

    assert allowed(state) == []


@pytest.mark.parametrize("text", ["b", "aba", "xyz"], ids=["another", "too_long", "no_tokens"])
def test_a_text_that_the_grammar_does_not_let_through_is_not_continued(text: str):
    assert allowed(Grammars(M15, {EOS}).state(Grammar("ab"), text)) == []


def test_sentencepiece_tokens_are_the_text_that_they_stand_for():
    words = ["<unk>", "▁a", "a", "▁", "</s>", "<0x20>", "<0xC3>", "<0xA9>", "é"]
    state = Grammars(sentencepiece(*words), {EOS}).state(Grammar(" ?a(é|a)"))

    assert allowed(state, vocab_size=9) == [1, 2, 3, 5]
    state.accept(1)
    assert allowed(state, vocab_size=9) == [2, 6, 8]


def test_text_that_is_forced_is_tokenized_as_the_tokenizer_would():
    tokenizer = sentencepiece("<unk>", "▁a", "a", "▁", "</s>", "<0x20>", "<0xC3>", "<0xA9>", "é")
    state = Grammars(tokenizer, {EOS}).state(Grammar(" aé"))

    for id_ in tokenizer.encode(" aé", add_special_tokens=False):
        assert allowed(state, vocab_size=9) == [id_]
        state.accept(id_)


def test_ids_that_only_the_model_has_are_never_chosen():
    state = Grammars(byte_level("a", "b", "ab", "1", "</s>", vocab_size=70), {EOS}).state(Grammar(r"(?s).*"))

    assert allowed(state, vocab_size=70) == [0, 1, 2, 3, EOS]


def test_special_tokens_are_no_text():
    tokenizer = load_tokenizer(PRESETS[0].tokenizer_directory)
    state = Grammars(tokenizer, {tokenizer.eos_id or 0}).state(Grammar(r"(?s).*"))

    assert set(allowed(state, tokenizer.vocab_size)) & tokenizer.special_ids == {tokenizer.eos_id}


@pytest.mark.parametrize("regex", ["(", "(?=a)b", "b"])
def test_reliability_F7_a_grammar_that_cannot_be_enforced_fails_its_row_alone(regex: str):
    rows = [row(), row(Grammars(M15, {EOS}).state(Grammar(regex))), row()]
    logits = torch.tensor([[0.0, 0.0, 0.0, 5.0, 0.0]] * 3)
    rows[1].grammar.accept(0) if rows[1].grammar else None

    choice = TokenChooser(rows, 5, {EOS}, torch.device("cpu")).choose(logits, [[0]] * 3).to_host()

    assert choice.failed == [False, True, False]
    assert (choice.ids[0], choice.ids[2]) == (3, 3)


def test_a_token_that_the_grammar_forbids_fails_the_state():
    state = Grammars(M15, {EOS}).state(Grammar("a+b"))
    state.accept(3)

    assert allowed(state) == []


@pytest.mark.parametrize("tokenizer", [byte_level("a", "b"), SlowTokenizer], ids=["no_end", "slow"])
def test_a_grammar_that_cannot_be_served_fails_its_state(tokenizer: FastTokenizer | type[SlowTokenizer]):
    if isinstance(tokenizer, type):
        tokenizer = object.__new__(SlowTokenizer)  # type: ignore[assignment]
        tokenizer.vocab_size = 5

    assert allowed(Grammars(tokenizer, []).state(Grammar("a"))) == []  # type: ignore[arg-type]


def test_reliability_Q12_the_last_grammars_are_kept_and_shared():
    grammars = Grammars(M15, {EOS})
    first = grammars.automaton(Grammar("a"))
    shared = grammars.automaton(Grammar("a")) is first
    for number in range(MAX_CACHED):
        grammars.automaton(Grammar(f"a{{{number + 1}}}"))

    assert shared
    assert len(grammars.cached) == MAX_CACHED
    assert grammars.automaton(Grammar("a")) is not first


def test_reliability_Q12_large_automata_are_dropped_first():
    sizes = iter([0, 200 << 20, 0, 100 << 20, 0, 1 << 20])
    grammars = Grammars(M15, {EOS}, resident_bytes=lambda: next(sizes))

    grammars.automaton(Grammar("a"))
    grammars.automaton(Grammar("b"))
    grammars.automaton(Grammar("ab"))

    assert [each.text for each in grammars.cached] == ["b", "ab"]


def test_limits_that_others_used_up_do_not_end_a_sequence():
    """Sequences share an automaton. If it has grown too large, only sequences that are far in it continue with it."""
    tokenizer = load_tokenizer(PRESETS[0].tokenizer_directory)
    grammars = Grammars(tokenizer, {tokenizer.eos_id or 0})
    regex = ".*(a|b|c2).{300}x"
    spent = grammars.automaton(Grammar(regex))
    generator = torch.Generator().manual_seed(0)

    walked = 0
    while not spent.start.is_error() and walked < 3000:
        walk = GrammarState(grammars, Grammar(regex))
        for _ in range(500):
            choices = allowed(walk, tokenizer.vocab_size)
            if not choices:
                break
            walk.accept(choices[int(torch.randint(len(choices), (1,), generator=generator))])
            walked += 1
        if grammars.automaton(Grammar(regex)) is not spent:
            break

    assert grammars.automaton(Grammar(regex)) is not spent, "its limits were not reached"
    assert allowed(grammars.state(Grammar(regex)), tokenizer.vocab_size) != []


class SlowClock:
    """A clock that advances by `step_ms` at each call."""

    def __init__(self) -> None:
        self.step_ms = self._now_ms = 0

    def __call__(self) -> int:
        self._now_ms += self.step_ms
        return self._now_ms * 1_000_000


@pytest.mark.parametrize("at", ["start", "continuation", "mask", "token"])
def test_reliability_Q13_a_grammar_that_holds_up_its_batch_is_ended_and_refused(at: str):
    clock = SlowClock()
    grammars = Grammars(M15, {EOS}, clock_ns=clock)
    regex = "a+b1" if at == "start" else "a+b"
    state = grammars.state(Grammar("a+b"))

    clock.step_ms = 60
    match at:
        case "start":
            state = grammars.state(Grammar(regex))
        case "continuation":
            state = grammars.state(Grammar(regex), "a")
        case "mask":
            allowed(state)
        case "token":
            state.accept(0)
    clock.step_ms = 0

    assert allowed(state) == allowed(grammars.state(Grammar(regex))) == []
    assert allowed(grammars.state(Grammar("a+"))) == [0]


def test_resident_memory_is_read():
    assert (1 << 20) < read_resident_bytes() < (1 << 40)
    assert Path("/proc/self/statm").exists()


def test_hardening_R24_the_end_of_a_match_has_no_text():
    # The tokenizer counts `<end>` as text.
    tokenizer = byte_level("a", "b", "<end>")
    sequence = sequence_of(tokenizer, Grammars(tokenizer, {2}).state(Grammar("ab")), frozenset({2}))
    generations = Generations(tokenizer, prompt_logprobs=False)

    made = [generations.append(sequence, id_, 0.0, ((), ())) for id_ in (0, 1, 2)]

    assert [each.tokens.texts for each in made] == [("a",), ("b",), ("",)]
    assert made[-1].tokens.is_special == (True,)
    assert made[-1].generated_text is not None
    assert (made[-1].generated_text.text, made[-1].generated_text.finish_reason) == ("ab", FinishReason.EOS_TOKEN)


def sequence_of(tokenizer: FastTokenizer, state: GrammarState, eos_ids: frozenset[int]) -> Sequence:
    """A sequence with the prompt `a`, and a grammar."""
    stopping = StoppingParameters(9)
    return Sequence(
        request=Request(0, ("a",), 1, ChooserParameters(), stopping),
        ids=[0],
        prompt_len=1,
        cache_len=0,
        input_len=1,
        blocks=np.zeros(1, dtype=np.int64),
        stopping=StoppingCriteria(stopping, eos_ids),
        detokenizer=IncrementalDetokenizer(tokenizer, [0]),
        grammar=state,
    )
