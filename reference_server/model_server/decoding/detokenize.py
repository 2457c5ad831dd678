"""Token ids to streamed text: every token's piece as soon as its characters are whole."""

from collections.abc import Sequence

from reference_server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# How many prompt tokens the first piece is decoded with; TGI's number.
_PROMPT_CONTEXT = 5


class IncrementalDetokenizer:
    """The streamed text of one sequence; special tokens are part of it.

    Keeps the tokens from `prefix_offset` on, of which the first `read_offset - prefix_offset` have been emitted:

        ids      ... |--- prefix ---|--- pending ---|
                     ^ prefix_offset ^ read_offset
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_PROMPT_CONTEXT:])
        self._read = len(self._window)
        self._prefix_text: str | None = None
        self._at_boundary = False

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        if self._at_boundary and (text := self._whole_text(token_id)):
            self._window = [token_id]
            self._read = 1
            self._prefix_text = text
            return text
        self._window.append(token_id)
        if self._prefix_text is None:
            self._prefix_text = self._tokenizer.decode(self._window[: self._read])
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(self._prefix_text) or text.endswith(_REPLACEMENT):
            self._at_boundary = False
            return ""
        piece = text[len(self._prefix_text) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._prefix_text = None
        self._at_boundary = self._tokenizer.is_bytewise
        return piece

    def _whole_text(self, token_id: int) -> str | None:
        """The token's text if it needs no neighbours: bytewise decoding, and no part of a character in it."""
        text = self._tokenizer.text_of(token_id)
        return None if _REPLACEMENT in text else text


def final_text(tokenizer: Tokenizer, ids: Sequence[int], prompt_len: int) -> str:
    """The generated text without special tokens; ids: the prompt and what followed it.

    One prompt token is decoded along, so that a leading space is right. A character that the output ends in the
    middle of shows as U+FFFD; TGI returns no text at all then.
    """
    context_start = max(prompt_len - 1, 0)
    context = tokenizer.decode(ids[context_start:prompt_len], skip_special_tokens=True)
    return tokenizer.decode(ids[context_start:], skip_special_tokens=True)[len(context) :]
