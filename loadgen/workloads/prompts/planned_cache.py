"""The prompt tokens in a prefix cache without a limit when a prompt is sent, as the workload plans them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from loadgen.workloads.prompts.prompt import Prompt

FINEST_CHARACTERS = 64
"""Texts of files are compared by character at their start, then in pieces that grow to 1/64 of their position."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Facts that planning needs, measured before a run.

    shared_tokens: at the start of every prompt, by the tokenizer, the chat template and the marker of the run;
    special_tokens: those of them that generated texts count as their own; block_tokens: tokens of a block of the
    server's cache, 1 if unknown; marker_tokens: of a file's marker; words: that generated texts are composed of.
    """

    shared_tokens: int = 0
    special_tokens: int = 0
    block_tokens: int = 1
    marker_tokens: int = 0
    words: int = 0


NO_FACTS = CacheFacts()


@dataclass(slots=True)
class KnownPrefixes:
    """The parts that were sent so far, as chains from the start of a prompt. Each adapter has a cache of its own.

    Only the server counts the tokens of an image, so prompts with images have no plan.
    """

    facts: CacheFacts
    keeps_answers: bool
    _chains: set[int] = field(default_factory=set)
    _sent: Counter[str | None] = field(default_factory=Counter)

    def plan(self, prompt: Prompt) -> Prompt:
        """The prompt with the tokens, or for a file's text the share, that earlier prompts had at their start."""
        if prompt.images:
            return replace(prompt, planned_cached_tokens=None)
        matched, total = self._add(prompt)
        self._sent[prompt.adapter] += 1
        if self._sent[prompt.adapter] == 1:
            return replace(prompt, planned_cached_tokens=0)
        if prompt.input_tokens is None:
            share = matched / total if total else 0.0
            return replace(prompt, planned_cached_tokens=self.facts.shared_tokens, planned_cached_share=share)
        cached = (
            self.facts.shared_tokens + max(0, matched - self.facts.special_tokens) + self._by_chance(prompt.adapter)
        )
        cached = min(cached, prompt.input_tokens - 1)
        return replace(prompt, planned_cached_tokens=cached - cached % self.facts.block_tokens)

    def _add(self, prompt: Prompt) -> tuple[int, int]:
        """The size of the known parts, and of all."""
        chain, matched, total, is_known = hash((0, prompt.adapter)), 0, 0, True
        for size, key in prompt.parts:
            chain = hash((chain, key))
            is_known = is_known and chain in self._chains
            matched += size if is_known else 0
            total += size
            self._chains.add(chain)
        if self.keeps_answers and prompt.answer_key is not None:
            self._chains.add(hash((chain, prompt.answer_key)))
        return matched, total

    def _by_chance(self, adapter: str | None) -> int:
        """Tokens that a generated text has in common with the most similar of all earlier ones."""
        return 1 + round(math.log(self._sent[adapter]) / math.log(self.facts.words)) if self.facts.words > 1 else 0


def planned(
    prompts: Iterable[Prompt], facts: CacheFacts, sent_before: Iterable[Prompt] = (), *, keeps_answers: bool = False
) -> Iterator[Prompt]:
    """The prompts as planned. keeps_answers: the next turn of a session has the real answer."""
    known = KnownPrefixes(facts, keeps_answers)
    for prompt in sent_before:
        known.plan(prompt)
    for prompt in prompts:
        yield known.plan(prompt)


def text_parts(text: str) -> tuple[tuple[int, str], ...]:
    """A text whose tokens are unknown as parts (characters, piece), small at its start.

    >>> [size for size, _ in text_parts("x" * 130)][-3:], len(text_parts("x" * 130))
    ([1, 1, 2], 129)
    """
    parts: list[tuple[int, str]] = []
    at = 0
    while at < len(text):
        piece = text[at : at + max(1, at // FINEST_CHARACTERS)]
        parts.append((len(piece), piece))
        at += len(piece)
    return tuple(parts)
