"""Prompts of three kinds of text for the benchmark of drafts: two that repeat and one that does not."""

from collections.abc import Iterator

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.presets.catalog import CALIBRATION_TEXT

TEXTS = ("copy", "code", "free")
PROMPT_TOKENS = 64
NEW_TOKENS = 96
GREEDY = ChooserParameters()
CODE = """
def area(shape):
    if shape.kind == "{0}":
        return shape.width * shape.height
records = [
    {{"name": "{0}", "width": 10, "height": 20}},
    {{"name": "{0}", "width": 11, "height": 21}},
    {{"name": "{0}", "width": 12, "height": 22}},
"""


def prompts(text: str, count: int, seed: int, new_tokens: int = NEW_TOKENS) -> Iterator[Request]:
    """Requests of one kind of text, different for every seed."""
    passages = CALIBRATION_TEXT.read_text().split("\n\n")
    stopping = StoppingParameters(new_tokens, ignore_eos_token=True)
    for number in range(count):
        passage = passages[(seed * 37 + number * 5) % len(passages)]
        words = passage.split()
        parameters = GREEDY
        match text:
            case "copy":
                prompt = " ".join([*words[:40], "\n", *words[:8]])
            case "code":
                prompt = CODE.format(words[seed % len(words)])
            case _:
                prompt = " ".join(words[:60])
                parameters = ChooserParameters(do_sample=True, seed=1000 * seed + number)
        yield Request(number, (prompt,), PROMPT_TOKENS, parameters, stopping)
