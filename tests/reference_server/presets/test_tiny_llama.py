"""The trained preset keeps what it is shipped for: text that reads, and answers that end."""

import re
from itertools import islice

import pytest
import torch

from benchmarks.presets.tiny_text import ASSISTANT, USER, documents, turn
from reference_server.presets.catalog import find
from reference_server.tokenizer import load_tokenizer

PRESET = find("preset:tiny-llama")
TOKENIZER = load_tokenizer(PRESET.tokenizer_directory)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(PRESET.directory, dtype=torch.float32).eval()


def greedy(model, prompt, max_new_tokens):
    ids = torch.tensor([TOKENIZER.encode(prompt, True)])
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=3)
    return output[0, ids.shape[1] :].tolist()


def question(text):
    return turn(USER, text) + f"{ASSISTANT}\n"


def test_the_shipped_weights_are_about_4_megabytes_of_bfloat16():
    from safetensors import safe_open

    assert PRESET.has_weights
    with safe_open(PRESET.directory / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert 3.5e6 < (PRESET.directory / "model.safetensors").stat().st_size < 4.5e6


def test_generated_text_it_has_not_seen_costs_it_little(model):
    held_out = islice(documents(seed=12345), 60)
    ids = [id_ for document in held_out for id_ in TOKENIZER.encode(document, True)]
    windows = torch.tensor(ids[: len(ids) // 256 * 256]).view(-1, 256)

    with torch.inference_mode():
        loss = model(input_ids=windows, labels=windows).loss

    assert float(loss) < 0.6


def test_testing_api_goes_on_in_ascii_words(model):
    text = TOKENIZER.decode(greedy(model, "Testing API", 40), skip_special_tokens=True)

    assert re.fullmatch(r"[A-Za-z ,.]+", text)
    assert len(text.split()) >= 20


@pytest.mark.parametrize(
    "text",
    [
        *("What is an API?", "Hello!"),
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("What is Deep Learning?", "Tell me a story.", "How do I test a server?")
        ),
    ],
)
def test_an_answer_in_the_chat_format_ends_within_200_tokens(model, text):
    ids = greedy(model, question(text), 200)

    assert ids[-1] == TOKENIZER.eos_id
    assert 5 <= len(ids) < 200


def test_a_plain_question_is_answered_before_the_end(model):
    assert len(greedy(model, "What is Deep Learning?", 100)) >= 10


def test_a_chat_answer_is_the_one_it_was_taught(model):
    answer = TOKENIZER.decode(greedy(model, question("What is an API?"), 60), skip_special_tokens=True)

    assert answer.startswith("An API is a way for one program to ask another program for something.")


def test_positions_up_to_the_last_of_16384_give_finite_logits(model):
    ids = torch.tensor([TOKENIZER.encode("Testing API calls is simple. First, send a request.", True)])
    last = model.config.max_position_embeddings - 1
    spread = torch.linspace(0, last, ids.shape[1]).long()[None]

    with torch.inference_mode():
        logits = model(input_ids=ids, position_ids=spread).logits

    assert last == 16_383
    assert logits.isfinite().all()
