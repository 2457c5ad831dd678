"""Growing conversations: every turn repeats the turns before it and adds a question.

The answers in a prompt are scripted, with the requested length, so that prompts depend on the seed only and not on the
server.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.workloads.lengths import Lengths
from loadgen.workloads.prompts.installed import GeneratedLoad
from loadgen.workloads.prompts.prompt import Prompt, marker


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """An infinite sequence of sessions, each with its turns in order."""

    load: GeneratedLoad
    turns: Lengths

    def __iter__(self) -> Iterator[Prompt]:
        for number in itertools.count():
            yield from self.session(number)

    def session(self, number: int) -> Iterator[Prompt]:
        rng = random.Random(f"lengths:{self.load.seed}:{number}")
        num_turns = self.turns.draw(rng)
        messages: list[tuple[int, str]] = []
        for turn in range(num_turns):
            key = f"{self.load.text_key}:{number}:{turn}"
            question_tokens, answer_tokens = self.load.lengths.draw(rng)
            messages.append((question_tokens, f"question:{key}"))
            yield self._prompt(number, turn, num_turns, messages, answer_tokens)
            messages.append((answer_tokens, f"answer:{key}"))

    def _prompt(
        self, number: int, turn: int, num_turns: int, messages: list[tuple[int, str]], answer_tokens: int
    ) -> Prompt:
        planned = sum(tokens for tokens, _ in messages)
        input_tokens, output_tokens = self.load.limits.clip(planned, answer_tokens)
        input_tokens = max(input_tokens, self.load.vocabulary.shortest)
        session_id = f"multi_turn-{self.load.seed}-{number}"
        own = marker(self.load.is_cold, f"{self.load.text_key}:{number}:{turn}")
        pieces = self.load.vocabulary.compose([*own, *messages], input_tokens)
        pieces[: len(own) + 1] = ["".join(pieces[: len(own) + 1])]
        roles = itertools.cycle(("user", "assistant"))
        return Prompt(
            prompt_id=f"{session_id}-{turn}",
            text="".join(pieces),
            messages=tuple({"role": role, "content": piece} for role, piece in zip(roles, pieces, strict=False)),
            planned_input_tokens=planned,
            planned_output_tokens=answer_tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            session_id=session_id,
            turn=turn,
            turns_left=num_turns - turn - 1,
            parts=(*own, *messages),
            answer_key=f"answer:{self.load.text_key}:{number}:{turn}" if input_tokens == planned else None,
        )
