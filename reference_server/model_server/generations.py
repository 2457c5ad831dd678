"""Turns a chosen token into a generation: text, stopping, logprobs of the prompt, the most probable tokens."""

import math
from collections.abc import Sequence as SequenceOf

from reference_server.messages import GeneratedText, Generation, Tokens
from reference_server.model_server.decoding.detokenize import final_text
from reference_server.model_server.decoding.sampling import HostChoice, TopTokens
from reference_server.model_server.sequence import Sequence
from reference_server.tokenizer import Tokenizer


class Generations:
    """Appends tokens to sequences. Every rank does the text work of every request, so that all ranks stop alike."""

    def __init__(self, tokenizer: Tokenizer, prompt_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt_logprobs = prompt_logprobs

    def append_choice(self, sequence: Sequence, chosen: HostChoice, row: int) -> Generation:
        """Append the token of one row of a step's choices."""
        return self.append(sequence, chosen.ids[row], chosen.logprobs[row], chosen.top_tokens[row])

    def append(self, sequence: Sequence, token_id: int, logprob: float, top: TopTokens) -> Generation:
        """Append one token; sets `sequence.stopped` with the last one."""
        is_first = len(sequence.ids) == sequence.prompt_len
        is_end = sequence.grammar is not None and sequence.grammar.is_end(token_id)
        text = "" if is_end else sequence.detokenizer.append(token_id)
        reason = sequence.stopping.finish_reason(token_id, text)
        sequence.ids.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        generated_text = None
        if reason is not None:
            sequence.stopped = True
            parameters = sequence.request.parameters
            generated_text = GeneratedText(
                text=final_text(self._tokenizer, _ids_with_text(sequence), sequence.prompt_len),
                generated_tokens=sequence.stopping.num_tokens,
                finish_reason=reason,
                seed=parameters.seed if parameters.samples else None,
            )
        return Generation(
            request_id=sequence.id,
            tokens=Tokens((token_id,), (logprob,), (text,), (is_end or token_id in self._tokenizer.special_ids,)),
            prefill_tokens=self._prefill_tokens(sequence) if is_first else None,
            generated_text=generated_text,
            top_tokens=(self._tokens_of(top),) if sequence.request.top_n_tokens else (),
        )

    def _prefill_tokens(self, sequence: Sequence) -> Tokens | None:
        """The prompt's tokens; those before the first computed one, and that one itself, have no logprob."""
        if not (self._prompt_logprobs and sequence.request.prefill_logprobs):
            return None
        ids = tuple(sequence.ids[: sequence.prompt_len])
        unknown = (math.nan,) * (len(ids) - len(sequence.prompt_logprobs))
        texts = tuple(self._tokenizer.text_of(id_) for id_ in ids)
        return Tokens(ids, unknown + tuple(sequence.prompt_logprobs), texts)

    def _tokens_of(self, top: TopTokens) -> Tokens:
        ids, logprobs = top
        texts = tuple(self._tokenizer.text_of(id_) for id_ in ids)
        return Tokens(tuple(ids), tuple(logprobs), texts, tuple(id_ in self._tokenizer.special_ids for id_ in ids))


def joined(generations: SequenceOf[Generation]) -> Generation:
    """One generation of several of the same request, in order."""
    first, last = generations[0], generations[-1]
    if first is last:
        return first
    tokens = [each.tokens for each in generations]
    return Generation(
        request_id=first.request_id,
        tokens=Tokens(
            tuple(id_ for each in tokens for id_ in each.ids),
            tuple(logprob for each in tokens for logprob in each.logprobs),
            tuple(text for each in tokens for text in each.texts),
            tuple(is_special for each in tokens for is_special in each.is_special),
        ),
        prefill_tokens=first.prefill_tokens,
        generated_text=last.generated_text,
        top_tokens=tuple(top for each in generations for top in each.top_tokens),
    )


def _ids_with_text(sequence: Sequence) -> list[int]:
    """The prompt and the output, without the tokens that end a grammar's match."""
    end = len(sequence.ids)
    while sequence.grammar is not None and end > sequence.prompt_len and sequence.grammar.is_end(sequence.ids[end - 1]):
        end -= 1
    return sequence.ids[:end]
