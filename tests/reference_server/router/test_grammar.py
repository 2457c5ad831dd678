"""The router's grammar compiler on real worker processes: reliability.md Q11, F17, F22 and section 4.5."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reference_server.errors import GenerationError, OverloadedError, RequestError, ValidationError
from reference_server.grammars.pool import LIMITS, worker_pool
from reference_server.router.grammar import GrammarCompiler, make_compiler
from reference_server.router.schemas.tgi import ANY_JSON_OBJECT, GrammarType
from reference_server.tokenizer import SlowTokenizer
from reference_server.workers import WorkerLimits
from tests.support.grammars import CompilingHere, compiler
from tests.support.regex_samples import accepts
from tests.support.word_tokenizer import WordTokenizer

SECOND = 10**9


def schema(value: Any) -> GrammarType:
    return GrammarType(type="json", value=value)


def optional_properties(count: int) -> GrammarType:
    """outlines-core writes out which of them may come first: the square of their number."""
    return schema({"properties": {f"p{i}": {"type": "null"} for i in range(count)}})


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@asynccontextmanager
async def started(clock: Clock | None = None, **limits: Any) -> AsyncIterator[GrammarCompiler]:
    asked = {"time_s": 5.0, "memory_bytes": LIMITS.memory_bytes, "max_waiting": 4, **limits}
    made = GrammarCompiler(worker_pool(1, WorkerLimits(**asked)), clock or Clock())
    made.start()
    try:
        yield made
    finally:
        await made.close()


async def outcome(grammars: GrammarCompiler, grammar: GrammarType) -> str:
    """The regex, or the error's type and text."""
    try:
        return await grammars.regex_of(grammar)
    except RequestError as error:
        return f"{error.error_type}: {error}"


async def test_reliability_Q11_hostile_grammars_are_answered_one_by_one():
    hostile = [
        optional_properties(5000),
        GrammarType(type="regex", value="((a{50}){50}){50}"),
        GrammarType(type="regex", value="((a+)+)+b"),
        GrammarType(type="regex", value="|".join(f"word{i}" for i in range(15_000))),
        GrammarType(type="regex", value="(?=a)b"),
        schema({"properties": {"a": {"$ref": "#"}}}),
        schema({"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}),
    ]
    async with started(time_s=2.0) as grammars:
        told = [await outcome(grammars, each) for each in hostile]
        after = await grammars.regex_of(schema({"properties": {}}))

    assert [text[:62] for text in told] == [
        "validation: Input validation error: cannot compile regex from ",
        "validation: Input validation error: grammar is not valid: too ",
        "((a+)+)+b",
        "validation: Input validation error: grammar is not valid: too ",
        "generation: Request failed during generation: grammar is not v",
        "validation: Input validation error: cannot compile regex from ",
        "validation: Input validation error: cannot compile regex from ",
    ]
    assert accepts(after, "{}")


async def test_reliability_F22_a_deadly_grammar_is_not_tried_for_a_minute():
    clock = Clock()
    deadly = optional_properties(4000)
    async with started(clock, time_s=0.3) as grammars:
        await grammars.regex_of(ANY_JSON_OBJECT)
        told = []
        for _ in range(4):
            clock.now_ns += SECOND
            told.append(await outcome(grammars, deadly))
        clock.now_ns += 61 * SECOND
        tried_again = await outcome(grammars, deadly)

    stopped = "validation: Input validation error: cannot compile regex from schema: too complex ("
    assert [text.removeprefix(stopped).partition(":")[0] for text in [*told, tried_again]] == [
        "time", "time", "time", "it was stopped three times)", "time",
    ]  # fmt: skip


async def test_reliability_Q11_more_jobs_than_may_wait_are_overload():
    async with started(max_waiting=2, time_s=1.0) as grammars:
        await grammars.regex_of(ANY_JSON_OBJECT)
        many = [optional_properties(4000), *(schema({"properties": {f"p{i}": {}}}) for i in range(8))]
        told = await asyncio.gather(*(grammars.regex_of(each) for each in many), return_exceptions=True)

    assert {type(each) for each in told} == {ValidationError, OverloadedError, str}


async def test_reliability_F17_a_client_that_leaves_takes_nothing_from_the_others():
    grammars = compiler()
    grammar = GrammarType(type="regex", value="a+")
    leaving, staying = (asyncio.create_task(grammars.regex_of(grammar)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert await staying == "a+"


async def test_a_refusal_is_remembered_and_raised_anew():
    pool = CompilingHere()
    grammars = compiler(pool)
    caught = []
    for _ in range(2):
        with pytest.raises(GenerationError) as error:
            await grammars.regex_of(GrammarType(type="regex", value="("))
        caught.append(error.value)

    assert len(pool.jobs) == 1
    assert caught[0] is not caught[1]
    assert str(caught[0]) == str(caught[1])


async def test_reliability_4_5_62_what_is_kept_is_bounded():
    pool = CompilingHere()
    grammars = compiler(pool)
    for number in range(300):
        await grammars.regex_of(GrammarType(type="regex", value=f"a{{{number}}}"))
    await grammars.regex_of(GrammarType(type="regex", value="a{299}"))
    await grammars.regex_of(GrammarType(type="regex", value="a{0}"))

    assert len(pool.jobs) == 301
    assert len(grammars._kept) == 256


def test_grammars_are_refused_where_they_cannot_be_served():
    assert make_compiler(True, WordTokenizer()) is None
    assert make_compiler(False, object.__new__(SlowTokenizer)) is None
    assert make_compiler(False, WordTokenizer()) is not None
