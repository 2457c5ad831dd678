import json
import subprocess
import sys
import threading

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from reference_server.errors import StartupError
from reference_server.presets.catalog import find
from reference_server.token_bytes import longest_token
from reference_server.tokenizer import FastTokenizer, SlowTokenizer, load_tokenizer

TEXTS = (
    "Testing API",
    "  two  spaces\n\nand lines ",
    "我很感谢你的热情",
    "<|user|>\nHi there 🙂</s>\n<|assistant|>\n",
    "1234 + 56",
    "",
)


@pytest.fixture(scope="module")
def directory():
    return find("preset:tiny-llama").tokenizer_directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory, vocab_size=32_000)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_auto_tokenizer(tokenizer, directory, text, add_special_tokens):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)

    assert tokenizer.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens)


def test_ids_are_the_same_after_transformers_wrote_the_files_again(tokenizer, directory, tmp_path):
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(directory).save_pretrained(tmp_path)
    rewritten = load_tokenizer(tmp_path)

    assert [rewritten.encode(text, True) for text in TEXTS] == [tokenizer.encode(text, True) for text in TEXTS]
    assert (rewritten.bos_id, rewritten.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert rewritten.special_ids == tokenizer.special_ids


def test_a_prompt_starts_with_one_bos_when_special_tokens_are_asked_for(tokenizer):
    assert tokenizer.encode("Testing API", True).count(tokenizer.bos_id) == 1
    assert tokenizer.encode("Testing API", True)[0] == tokenizer.bos_id
    assert tokenizer.bos_id not in tokenizer.encode("Testing API", False)


def test_offsets_are_characters_of_the_text(tokenizer):
    text = "我 Testing"

    tokens = tokenizer.encode_with_offsets(text, False)

    assert [id_ for id_, _, _ in tokens] == tokenizer.encode(text, False)
    assert text[tokens[-1][1] : tokens[-1][2]].strip() == "Testing"
    assert {(start, stop) for _, start, stop in tokens[:3]} == {(0, 1)}


def test_skipping_special_tokens_leaves_out_exactly_the_special_ids(tokenizer):
    ids = tokenizer.encode("<|user|>\nHi</s>", True)

    assert tokenizer.decode(ids, skip_special_tokens=True) == "\nHi"
    assert all(tokenizer.decode([id_], skip_special_tokens=True) == "" for id_ in tokenizer.special_ids)


def test_ids_that_the_tokenizer_lacks_decode_to_a_visible_placeholder(tokenizer):
    testing, api = tokenizer.encode("Testing API", False)

    assert tokenizer.vocab_size == 32_000
    assert tokenizer.decode([testing, 31_999, 2048, api]) == "Testing<|31999|><|2048|> API"
    assert tokenizer.decode([31_999], skip_special_tokens=True) == "<|31999|>"


def test_a_hole_in_the_vocabulary_decodes_to_a_placeholder_too():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    assert FastTokenizer(words, {}).decode([2, 1]) == "b<|1|>"


def test_truncation_and_padding_of_the_file_are_switched_off(directory, tmp_path):
    settings = json.loads((directory / "tokenizer.json").read_text())
    settings["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    settings["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))

    assert len(load_tokenizer(tmp_path).encode("one two three", True)) == 4


def test_special_tokens_may_be_objects(directory, tmp_path):
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    settings = {"bos_token": {"content": "<s>", "special": True}, "eos_token": None, "sep_token": " API"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    tokenizer = load_tokenizer(tmp_path)

    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, None)


def test_the_text_of_one_id_is_its_decoding_the_first_and_the_second_time(tokenizer):
    ids = [*tokenizer.encode("Testing 我</s>", True), 31_999]

    assert [tokenizer.text_of(id_) for id_ in ids * 2] == [tokenizer.decode([id_]) for id_ in ids * 2]
    assert tokenizer.is_bytewise


def test_nothing_to_load_fails_with_tgis_words(tmp_path):
    with pytest.raises(StartupError, match=r"^Tokenizer error: Unable to load tokenizer\.$"):
        load_tokenizer(tmp_path)


def test_a_damaged_file_fails_with_tgis_words(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(StartupError, match="Unable to load tokenizer"):
        load_tokenizer(tmp_path)


def test_a_python_tokenizer_has_no_offsets_and_the_same_placeholder(tmp_path):
    from transformers import ByT5Tokenizer

    slow = SlowTokenizer(ByT5Tokenizer(), vocab_size=1000)

    assert slow.decode(slow.encode("Hi 我", False)) == "Hi 我"
    assert slow.encode_with_offsets("Hi", False) == [(75, 0, 0), (108, 0, 0)]
    assert slow.decode([75, 999]) == "H<|999|>"
    assert slow.vocab_size == 1000


def test_reading_tokenizer_json_imports_neither_torch_nor_transformers(directory):
    code = (
        "import sys; from pathlib import Path; from reference_server.tokenizer import load_tokenizer; "
        f"load_tokenizer(Path({str(directory)!r})).encode('Testing', True); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("call", [pytest.param("encode", marks=pytest.mark.slow), "encode_with_offsets"])
def test_hardening_R6_other_threads_run_while_a_long_text_is_encoded(tokenizer, call):
    text = "The quick brown fox jumps over 13 lazy dogs. " * 20_000
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    getattr(tokenizer, call)(text, add_special_tokens=False)
    during = len(ticks) - before
    is_over.set()
    thread.join()

    assert during > 10


def test_hardening_R6_the_longest_token_bounds_the_text_of_each_token(tokenizer):
    texts = [*TEXTS, "\n" * 500, " " * 500, "𝔘" * 100, "e\u0301" * 100, "a" * 3000]
    counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    assert all(count * tokenizer.longest_token >= len(text.encode()) for text, count in zip(texts, counts, strict=True))


def _bpe(**parts):
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "aa": 1}, [("a", "a")], byte_fallback=True))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    ("made", "longest"),
    [
        (_bpe(), 2),
        (_bpe(normalizer=normalizers.Replace(" ", "▁")), 2),
        (_bpe(normalizer=normalizers.Replace("a", "")), None),
        (_bpe(normalizer=normalizers.NFC()), None),
        (_bpe(pre_tokenizer=pre_tokenizers.Split("a", "isolated")), 2),
        (_bpe(pre_tokenizer=pre_tokenizers.Split("a", "removed")), None),
        (_bpe(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), None),
        (tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")), None),
    ],
)
def test_hardening_R6_a_tokenizer_that_may_drop_text_has_no_longest_token(made, longest):
    assert longest_token(made) == longest
