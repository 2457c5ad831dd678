from typing import Any

import pytest

from reference_server.errors import StartupError, TemplateError
from reference_server.presets.catalog import find
from reference_server.router.chat.prompts import ChatTemplate, load_template, to_json
from reference_server.router.chat.tools import offer_of
from reference_server.router.schemas.openai import ChatMessage, ChatRequest
from reference_server.router.tokenizer_files import find_tokenizer_files


def user(content: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", "content": content})


def render(source: str, *contents: str) -> str:
    return ChatTemplate(source, "<s>", "</s>").render([user(content) for content in contents])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[::-1][0].content }}", "c"),
        ("{{ (messages | reverse)[0].content }}", "c"),
        ("{{ messages | map(attribute='content') }}", '["a", "b", "c"]'),
        ("{{ (messages | selectattr('content', 'equalto', 'b'))[0].content }}", "b"),
        ("{{ messages | rejectattr('content', 'equalto', 'b') | length }}", "2"),
        ("{{ {'k': 1} | items }}", '[["k", 1]]'),
        ("{{ [1, 1, 2] | unique }} {{ [0, 1] | select }} {{ [1, 2, 3] | batch(2) }}", "[1, 2] [1] [[1, 2], [3]]"),
    ],
)
def test_hardening_R22_filters_return_lists(source: str, text: str):
    assert render(source, "a", "b", "c") == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if true %}\n  x\n{% endif %}\n", "\n  x\n"),
        ("a\n\n", "a\n"),
        ("{{ nothing }}|", "|"),
        ("{{ none }} {{ true }} {{ false }} {{ 1 }}", "none true false 1"),
        ("{{ ['a', 1, true, none] }} {{ {'a': 'b'} }}", '["a", 1, true, none] {"a": "b"}'),
        ("{{ add_generation_prompt }} {{ tools is none }}", "true true"),
        ("{{ '<b>' }}", "<b>"),
        ("{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "01"),
        ("{{ ' a b '.strip().title().split() }}", '["A", "B"]'),
        ("{{ messages[0]['content'][0]['text'] }}", "hi"),
        ("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}", "hi"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ {'b': '<', 'a': [1, 'é']} | tojson }}", '{"a":[1,"é"],"b":"\\u003c"}'),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_rendering(source: str, text: str):
    assert render(source, "hi") == text


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('bad roles') }}", "syntax error: bad roles (in <string>:1)"),
        ("\n\n{{ raise_exception('late') }}", "syntax error: late (in <string>:3)"),
        ("{{ nothing.more }}", "undefined value: 'nothing' is undefined (in <string>:1)"),
        ("{{ 1 + 'a' }}", "invalid operation: unsupported operand type(s) for +: 'int' and 'str' (in <string>:1)"),
        ("{{ ''.__class__.__mro__ }}", "invalid operation: "),
        ("{{ 'a' * 100000000 }}", "invalid operation: "),
        ("{{ 10 ** 100000000 }}", "invalid operation: "),
        ("{{ '%1000000000d' % 1 }}", "invalid operation: "),
        ("{% for i in range(100001) %}{% endfor %}", "invalid operation: "),
        ("{% set x = messages.append(1) %}", "invalid operation: "),
    ],
)
def test_failures_have_a_kind_and_a_place(source: str, error: str):
    with pytest.raises(TemplateError) as caught:
        render(source, "hi")

    assert str(caught.value).startswith(f"Template error: {error}")


def test_a_template_that_does_not_compile_prevents_start_up():
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_an_assistants_last_turn_is_cut_at_its_last_occurrence():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}] {% endfor %}<a>")
    messages = [user("yes"), ChatMessage.model_validate({"role": "assistant", "content": "yes"})]

    assert template.render(messages) == "[yes] [yes"


def test_a_content_that_the_template_hides_cuts_nothing():
    template = ChatTemplate("fixed ")

    assert template.render([ChatMessage.model_validate({"role": "assistant", "content": "zz"})]) == "fixed "


PING = '{"description":null,"name":"ping","arguments":"{}"}'
TURNS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (TURNS, f'[hi\n---\n[{{"type":"function","function":{PING}}}]\nP]'),
        ("{{ tools[0].function.arguments }}" + TURNS, "{}[hi\n---\nP]"),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | length }}" + TURNS, "1[hi\n---\nP]"),
        ("{% set tools = 'own' %}{{ tools }}" + TURNS, f'own[hi\n---\n[{{"type":"function","function":{PING}}}]\nP]'),
    ],
    ids=["told_in_the_last_turn", "told_by_the_template", "defined_or_not", "a_variable_of_its_own"],
)
def test_http_4_5_a_template_that_reads_the_tools_is_given_them(source: str, text: str):
    tool = {"type": "function", "function": {"name": "ping", "parameters": {}}}
    request = {"messages": [], "tools": [tool], "tool_choice": "required", "tool_prompt": "P"}
    offer = offer_of(ChatRequest.model_validate(request))
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}
    calling = ChatMessage.model_validate({"role": "user", "tool_calls": [call]})

    assert ChatTemplate(source).render([user("hi")], offer) == text
    assert "---" not in ChatTemplate(source).render([user("hi"), calling], offer)
    assert "---" not in ChatTemplate(source).render([], offer)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([{"chat_template": "one"}, {"chat_template": "two"}], "one"),
        ([{}, {"chat_template": "two"}], "two"),
        ([{"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]}], "y"),
        ([{"chat_template": [{"name": "tool_use", "template": "x"}]}, {"chat_template": "z"}], "z"),
    ],
)
def test_the_first_template_found_is_taken(files: list[dict[str, Any]], text: str):
    template = load_template(files, {})

    assert template is not None
    assert template.compile().render([]) == text


def test_no_template_is_no_template():
    assert load_template([{}, {"chat_template": 5}], {}) is None


def test_tokens_may_be_objects():
    template = load_template([{"chat_template": "{{ bos_token }}{{ eos_token }}"}], {"bos_token": {"content": "<s>"}})

    assert template is not None
    assert template.compile().render([]) == "<s>none"


def test_indented_json():
    assert to_json({"a": [1]}, indent=2) == '{\n  "a": [\n    1\n  ]\n}'


def test_presets_have_a_template_and_a_tokenizer():
    preset = find("preset:tiny-llama")
    assert preset is not None
    files = find_tokenizer_files(preset.model_id)
    template = files.load_template()

    assert template is not None
    assert template.compile().render([user("hi")]) == "<s><|user|>\nhi</s>\n<|assistant|>\n"


def test_a_directory_is_read_and_files_may_be_missing_or_broken(tmp_path: Any):
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    (tmp_path / "chat_template.jinja").write_text("J")
    override = tmp_path / "other.json"
    override.write_text('{"chat_template": "O"}')
    files = find_tokenizer_files(str(tmp_path))

    from_jinja, from_override = files.load_template(), files.load_template(override)

    assert from_jinja is not None
    assert from_override is not None
    assert (from_jinja.compile().render([]), from_override.compile().render([])) == ("J", "O")
    assert (files.model_id, files.sha, files.pipeline_tag) == (str(tmp_path), None, None)
