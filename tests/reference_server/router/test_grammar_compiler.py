"""The router's grammar compiler on real worker processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reference_server.errors import GenerationError, OverloadedError, RequestError, ValidationError
from reference_server.grammars.pool import LIMITS, worker_pool
from reference_server.messages import Grammar
from reference_server.router.grammar_compiler import GrammarCompiler, make_compiler
from reference_server.router.schemas.tgi import ANY_JSON_OBJECT, RequestGrammar
from reference_server.tokenizer import SlowTokenizer
from reference_server.workers import WorkerLimits
from tests.support.models.word_tokenizer import WordTokenizer
from tests.support.samples.grammar_samples import accepts
from tests.support.samples.grammars import CompilingHere, compiler

SECOND = 10**9


def schema(value: Any) -> RequestGrammar:
    return RequestGrammar(type="json", value=value)


def optional_properties(count: int) -> RequestGrammar:
    """outlines-core writes out which of them may come first: the square of their number."""
    return schema({"properties": {f"p{i}": {"type": "null"} for i in range(count)}})


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@asynccontextmanager
async def started(
    clock: Clock | None = None, accepts_schemas: bool = True, **limits: Any
) -> AsyncIterator[GrammarCompiler]:
    asked = {"time_s": 5.0, "memory_bytes": LIMITS.memory_bytes, "max_waiting": 4, **limits}
    made = GrammarCompiler(worker_pool(1, WorkerLimits(**asked)), accepts_schemas, clock or Clock())
    made.start()
    try:
        yield made
    finally:
        await made.close()


async def outcome(grammars: GrammarCompiler, grammar: RequestGrammar) -> str:
    """The compiled text, or the error's type and text."""
    try:
        return (await grammars.compile(grammar)).text
    except RequestError as error:
        return f"{error.error_type}: {error}"


@pytest.mark.parametrize("accepts_schemas", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_reliability_Q11_hostile_grammars_are_answered_one_by_one(accepts_schemas: bool):
    hostile = [
        optional_properties(5000),
        RequestGrammar(type="regex", value="((a{50}){50}){50}"),
        RequestGrammar(type="regex", value="((a+)+)+b"),
        RequestGrammar(type="regex", value="|".join(f"word{i}" for i in range(15_000))),
        RequestGrammar(type="regex", value="(?=a)b"),
        schema({"properties": {"a": {"$ref": "#/$defs/a"}}}),
        schema({"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}),
    ]
    async with started(time_s=2.0, accepts_schemas=accepts_schemas) as grammars:
        answers = [await outcome(grammars, each) for each in hostile]
        after = await grammars.compile(schema({"properties": {}}))

    assert [text[:62] for text in answers] == [
        "validation: Input validation error: cannot compile regex from ",
        "validation: Input validation error: grammar is not valid: too ",
        "((a+)+)+b",
        "validation: Input validation error: grammar is not valid: too ",
        "generation: Request failed during generation: grammar is not v",
        "validation: Input validation error: cannot compile regex from ",
        "validation: Input validation error: cannot compile regex from ",
    ]
    assert accepts(after, "{}")


@pytest.mark.slow
async def test_reliability_F22_a_grammar_that_kills_workers_is_refused_for_a_minute():
    clock = Clock()
    deadly = optional_properties(4000)
    async with started(clock, accepts_schemas=False, time_s=0.3) as grammars:
        await grammars.compile(ANY_JSON_OBJECT)
        answers = []
        for _ in range(4):
            clock.now_ns += SECOND
            answers.append(await outcome(grammars, deadly))
        clock.now_ns += 61 * SECOND
        tried_again = await outcome(grammars, deadly)

    stopped = "validation: Input validation error: cannot compile regex from schema: too complex ("
    assert [text.removeprefix(stopped).partition(":")[0] for text in [*answers, tried_again]] == [
        "time", "time", "time", "it was stopped three times)", "time",
    ]  # fmt: skip


async def test_reliability_Q11_too_many_waiting_jobs_are_refused_as_overload():
    async with started(max_waiting=2, accepts_schemas=False, time_s=1.0) as grammars:
        await grammars.compile(ANY_JSON_OBJECT)
        many = [optional_properties(4000), *(schema({"properties": {f"p{i}": {}}}) for i in range(8))]
        answers = await asyncio.gather(*(grammars.compile(each) for each in many), return_exceptions=True)

    assert {type(each) for each in answers} == {ValidationError, OverloadedError, Grammar}


async def test_reliability_F17_a_cancelled_client_does_not_cancel_the_others_grammar():
    grammars = compiler()
    grammar = RequestGrammar(type="regex", value="a+")
    leaving, staying = (asyncio.create_task(grammars.compile(grammar)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert await staying == Grammar("a+")


async def test_a_refusal_is_cached_and_raised_again():
    pool = CompilingHere()
    grammars = compiler(pool)
    caught = []
    for _ in range(2):
        with pytest.raises(GenerationError) as error:
            await grammars.compile(RequestGrammar(type="regex", value="("))
        caught.append(error.value)

    assert len(pool.jobs) == 1
    assert caught[0] is not caught[1]
    assert str(caught[0]) == str(caught[1])


@pytest.mark.slow
async def test_reliability_4_5_62_the_cache_is_bounded():
    pool = CompilingHere()
    grammars = compiler(pool)
    for number in range(300):
        await grammars.compile(RequestGrammar(type="regex", value=f"a{{{number}}}"))
    for cached in (299, 300 - 256):
        await grammars.compile(RequestGrammar(type="regex", value=f"a{{{cached}}}"))
    assert len(pool.jobs) == 300
    await grammars.compile(RequestGrammar(type="regex", value=f"a{{{300 - 256 - 1}}}"))

    assert len(pool.jobs) == 301


def test_grammars_are_refused_without_their_packages_or_a_fast_tokenizer():
    assert make_compiler(True, WordTokenizer(), True) is None
    assert make_compiler(False, object.__new__(SlowTokenizer), True) is None
    assert make_compiler(False, WordTokenizer(), True) is not None
