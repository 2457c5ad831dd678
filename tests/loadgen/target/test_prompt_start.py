"""Tokens before the text of a prompt, on servers that report different things."""

import json

import pytest

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.openai import OpenAiChat
from loadgen.target.prompt_start import StartProbe
from loadgen.target.server_kind import KINDS

BEFORE, AFTER = ["<s>", "<user>", "\n"], ["</s>", "<assistant>"]


class Server:
    """A chat server whose tokens are characters, with a template around each message."""

    def __init__(self, reports_cache=True, has_tokens=False, counts=True):
        self.reports_cache, self.has_tokens, self.counts = reports_cache, has_tokens, counts
        self.known = []

    def post(self, path, body):
        request = json.loads(body)
        tokens = [*BEFORE, *request["messages"][0]["content"], *AFTER]
        if path == "/tokenize":
            return (200, json.dumps({"tokens": tokens}).encode()) if self.has_tokens else (404, b"{}")
        cached = max((self.shared(tokens, other) for other in self.known), default=0)
        self.known.append(tokens)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        if self.reports_cache:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        choice = {"message": {"content": "x"}, "finish_reason": "length"}
        return 200, json.dumps({"choices": [choice], **({"usage": usage} if self.counts else {})}).encode()

    @staticmethod
    def shared(one, other):
        equal = [a == b for a, b in zip(one, other, strict=False)]
        return equal.index(False) if False in equal else len(equal)


@pytest.mark.parametrize(("kind", "has_tokens"), [("vllm", True), ("vllm", False), ("llamacpp", False)])
def test_the_tokens_after_the_text_are_not_counted(kind, has_tokens):
    probe = StartProbe(Server(has_tokens=has_tokens), OpenAiChat(Sampling(streams=False)), KINDS[kind], "key")

    assert probe.tokens("") == len(BEFORE)
    assert probe.tokens("mark ") == len(BEFORE) + 5


def test_without_cached_tokens_the_template_is_an_upper_bound():
    probe = StartProbe(Server(reports_cache=False), OpenAiChat(Sampling(streams=False)), KINDS["openai"], "key")

    assert probe.tokens("") == len(BEFORE) + len(AFTER)


def test_a_server_that_counts_nothing_has_no_start():
    server = Server(reports_cache=False, counts=False)

    assert StartProbe(server, OpenAiChat(Sampling(streams=False)), KINDS["openai"], "key").tokens("") == 0
