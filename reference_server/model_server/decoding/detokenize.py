"""Token ids to streamed text: each token's piece as soon as its characters are complete."""

from collections.abc import Sequence

from reference_server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Prompt tokens that the first piece is decoded with; TGI's number.
_PROMPT_CONTEXT = 5


class IncrementalDetokenizer:
    """The streamed text of one sequence, special tokens included.

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
        """The text that `token_id` completes; empty while a character is incomplete."""
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
        """The token's text, or None if it has part of a character. For tokenizers that decode byte by byte."""
        text = self._tokenizer.text_of(token_id)
        return None if _REPLACEMENT in text else text


def final_text(tokenizer: Tokenizer, ids: Sequence[int], prompt_len: int) -> str:
    """The generated text without special tokens. ids: the prompt and the output.

    One prompt token is decoded with it, so that a leading space is right. An incomplete last character is U+FFFD, where
    TGI returns no text.
    """
    context_start = max(prompt_len - 1, 0)
    context = tokenizer.decode(ids[context_start:prompt_len], skip_special_tokens=True)
    return tokenizer.decode(ids[context_start:], skip_special_tokens=True)[len(context) :]
