"""The prompt of every request: the same text, with at least the requested number of tokens."""

from reference_server.errors import ArgumentError
from reference_server.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and 13 jovial wizards quietly bake a very large cake. "


def prompt_of(tokenizer: Tokenizer, tokens: int) -> str:
    """Text of at least `tokens` tokens; the model server keeps the last ones. Raises ArgumentError."""
    per_text = len(tokenizer.encode(TEXT, add_special_tokens=False))
    if not per_text:
        raise ArgumentError("the tokenizer has no token for English text: set `--tokenizer-name` to the model's")
    text = TEXT * (tokens // per_text + 1)
    while len(tokenizer.encode(text, add_special_tokens=False)) < tokens:
        text += TEXT
    return text
