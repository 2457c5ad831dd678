"""Conversations whose next prompt repeats what the server really answered, in place of scripted words."""

from dataclasses import dataclass, field, replace

from loadgen.datasets.prompt import Prompt
from loadgen.protocols.dialect import Answer, Dialect


@dataclass(slots=True)
class Conversations:
    """What was answered so far in the sessions under way."""

    dialect: Dialect
    _answers: dict[str, list[str]] = field(default_factory=dict)

    def completed(self, prompt: Prompt, body: bytes) -> tuple[Prompt, bytes]:
        """The turn with the real answers before it; one that was cut to the server's limits stays scripted."""
        said = self._answers.get(prompt.session_id or "")
        is_cut = prompt.input_tokens != prompt.planned_input_tokens
        if not said or prompt.messages is None or is_cut:
            return prompt, body
        answers = iter(said)
        messages = tuple(
            {**message, "content": next(answers, message["content"])} if message["role"] == "assistant" else message
            for message in prompt.messages
        )
        real = replace(prompt, messages=messages, text="".join(message["content"] for message in messages))
        return real, self.dialect.body(real)

    def note(self, prompt: Prompt, answer: Answer, *, is_ok: bool) -> None:
        """Keep an answer for the turns that follow; forget the session after its last, and after a failure."""
        session = prompt.session_id or ""
        if prompt.turns_left and is_ok:
            self._answers.setdefault(session, []).append(answer.text)
        else:
            self._answers.pop(session, None)
