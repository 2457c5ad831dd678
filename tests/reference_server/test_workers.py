"""The killable workers, with real processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reference_server.errors import OverloadedError, StartupError, TemplateError
from reference_server.router.chat.prompts import TemplateSource
from reference_server.router.chat.rendering_pool import RenderingPool
from reference_server.router.chat.tools import offer_of
from reference_server.router.schemas.openai import ChatMessage, ChatRequest

# The first message selects what the template does, so one pool serves many cases.
HOSTILE = """
{%- set wish = messages[0].content -%}
{%- if wish == 'loop' -%}{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif wish == 'memory' -%}
{%- set ns = namespace(kept=[]) -%}
{%- for i in range(999) -%}{%- set ns.kept = ns.kept + ['x' * 900000 ~ i] -%}{%- endfor -%}
{%- elif wish == 'output' -%}{%- for i in range(999) -%}{{ 'x' * 1000 }}{%- endfor -%}
{%- elif wish == 'raise' -%}{{ raise_exception('no') }}
{%- elif wish == 'class' -%}{{ ''.__class__.__mro__ }}
{%- else -%}{{ wish }}{%- endif -%}
"""


def said(*contents: str) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": "user", "content": content}) for content in contents]


@asynccontextmanager
async def pool(source: str = HOSTILE, **options: Any) -> AsyncIterator[RenderingPool]:
    options = {"workers": 1, "max_waiting": 4, "max_characters": 10_000, "time_s": 60.0, **options}
    rendering = RenderingPool(TemplateSource(source), **options)
    try:
        await rendering.start()
        yield rendering
    finally:
        await rendering.close()


async def test_reliability_4_4_48_a_hostile_template_costs_its_request_only():
    wishes = {
        "memory": "Template error: it used more than 512 MiB",
        "output": "Template error: syntax error: the prompt has more than 10000 characters",
        "raise": "Template error: syntax error: no (in <string>:8)",
        "class": "Template error: invalid operation: ",
    }
    async with pool() as rendering:
        for wish, error in wishes.items():
            with pytest.raises(TemplateError) as caught:
                await rendering.render(said(wish))
            assert str(caught.value).startswith(error)
            assert await rendering.render(said(f"after {wish} ✓")) == f"after {wish} ✓"


async def test_reliability_4_4_48_a_template_that_does_not_end_is_stopped_and_its_worker_replaced():
    async with pool(time_s=1.0) as rendering:
        with pytest.raises(TemplateError, match="it took longer than 1 s"):
            await rendering.render(said("loop"))

        assert await rendering.render(said("after")) == "after"


async def test_reliability_4_4_47_tools_reach_the_worker_as_plain_text():
    tools = [{"type": "function", "function": {"name": "{{ 7 * 7 }}"}}]
    asked = {"messages": [], "tools": tools, "tool_choice": "required", "tool_prompt": "{{ 7 * 7 }}"}
    async with pool("{{ tools[0].function.name }} {{ messages[0].content }}") as rendering:
        text = await rendering.render(said("hi"), offer_of(ChatRequest.model_validate(asked)))

    assert text == "{{ 7 * 7 }} hi\n---\n{{ 7 * 7 }}"


async def test_reliability_F17_a_caller_that_leaves_delays_no_other_for_long():
    async with pool() as rendering:
        leaving = asyncio.create_task(rendering.render(said("one")))
        await asyncio.sleep(0)
        leaving.cancel()

        assert await rendering.render(said("two")) == "two"


async def test_more_than_may_wait_are_refused():
    async with pool(max_waiting=2) as rendering:
        renders = [asyncio.create_task(rendering.render(said(str(number)))) for number in range(4)]
        results = await asyncio.gather(*renders, return_exceptions=True)

    assert [type(result) for result in results].count(OverloadedError) == 1
    assert [result for result in results if isinstance(result, str)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "the chat template does not compile"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.5 s"),
    ],
)
async def test_reliability_T25_a_template_that_cannot_be_used_prevents_start_up(source: str, error: str):
    with pytest.raises(StartupError, match=error):
        async with pool(source, time_s=0.5):
            pass


async def test_a_template_that_refuses_one_turn_still_starts():
    async with pool("{{ raise_exception('two turns, please') }}") as rendering:
        with pytest.raises(TemplateError, match="two turns"):
            await rendering.render(said("x"))
