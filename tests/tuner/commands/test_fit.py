"""`tgi-tune fit` from its command line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from loadgen import program
from tuner import cli


@pytest.fixture(autouse=True)
def without_signal_handlers(monkeypatch):
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


def test_the_table_has_each_method_and_the_methods_that_fit(capsys):
    assert cli.main(["fit", "preset:llama-3.1-8b", "--gpu", "a10g"]) == 0

    text = capsys.readouterr().out
    assert "llama: 8,030,261,248 parameters, 32 layers, 32 heads, 8 K/V heads of 128" in text
    assert "K/V of one token: 128 KiB, 128 KiB on each GPU" in text
    assert "requests of 1,200" in text
    assert "fits: none, eetq, int4, fp8, bitsandbytes" in text


def test_json_has_bytes_and_requests(capsys):
    words = ["--gpu", "24GiB", "--count", "2", "--input-tokens", "500", "--output-tokens", "500", "--json"]

    assert cli.main(["fit", "preset:bloom-560m", *words]) == 0

    found = json.loads(capsys.readouterr().out)
    row = found["methods"][0]
    assert found["model"]["parameters"] == 559_214_592
    assert (found["kv_bytes_per_token"], found["kv_bytes_per_token_per_gpu"]) == (98_304, 49_152)
    assert row["quantize"] == "none"
    assert row["weight_bytes"] == 1_118_429_184
    assert row["requests"] == row["kv_tokens"] // 1000 > 0


def test_a_model_that_does_not_fit_is_exit_code_1(capsys):
    assert cli.main(["fit", "preset:llama-3.1-8b", "--gpu", "4GiB"]) == 1

    assert "no method fits one request of 1,200 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "l4"], "MODEL is missing"),
        (["preset:llama-3.1-8b", "--gpu", "v100"], "unknown GPU v100"),
        (["preset:nonesuch", "--gpu", "l4"], "there is no built-in model 'preset:nonesuch'"),
        (["preset:llama-3.1-8b", "--gpu", "l4", "--count", "0"], "--count is 0"),
        (["preset:llama-3.1-8b", "--gpu", "l4", "--cuda-memory-fraction", "2"], "--cuda-memory-fraction is 2"),
        (["preset:llama-3.1-8b", "--gpu", "l4", "--numbers", "x"], "must be KEY=VALUE"),
        (["preset:llama-3.1-8b", "--gpu", "l4", "--count", "3"], "cannot be divided over 3 GPUs"),
    ],
)
def test_a_wrong_word_is_refused_by_name(words, message, capsys):
    assert cli.main(["fit", *words]) == 2

    assert message in capsys.readouterr().err


def test_the_answer_of_the_questions_page_is_the_output_of_the_command(capsys):
    page = (Path(__file__).parents[3] / "docs" / "tgi-questions.md").read_text(encoding="utf-8")
    found = re.search(
        r"^tgi-tune (fit [^\n]*)\n```\n\n<!-- output of tgi-tune fit -->\n```\n(.*?)```", page, re.M | re.S
    )
    assert found is not None

    assert cli.main(shlex.split(found[1])) == 0

    assert capsys.readouterr().out == found[2]
