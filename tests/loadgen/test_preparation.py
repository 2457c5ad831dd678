import itertools
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.preparation.cache_facts import cache_facts
from loadgen.preparation.length_check import check_lengths
from loadgen.preparation.length_control import choose_length_control
from loadgen.preparation.prepare_run import make_vocabulary, vocabulary_of
from loadgen.preparation.token_counter import TokenCounter, open_counter
from loadgen.target.control import ControlClient
from loadgen.target.launched.launch import LaunchedProcess
from loadgen.target.server_kind import OWN, TGI
from loadgen.target.target import Target, TargetFacts
from loadgen.workloads import workload
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from tests.loadgen.workloads.test_workload import VOCABULARY
from tests.support.servers.stream_server import stream_server

TEXT = [
    "the water of the river and the light of the day are part of the same world that we know",
    "people said that they could not find the house where the old man lived and worked",
    "numbers such as 1 2 3 and 10 20 30 are read by each reader in the same way",
] * 20


@pytest.fixture(scope="module", params=[300, 600])
def tokenizer_file(request, tmp_path_factory):
    """A byte-level BPE with few merges (most words are several tokens) and with many, and a begin token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=request.param,
        special_tokens=["<s>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_prompts_have_their_exact_length_under_a_real_tokenizer(tokenizer_file):
    counter = open_counter(
        BenchConfig(tokenizer=str(tokenizer_file)), ControlClient("http://127.0.0.1:9"), TargetFacts("tgi")
    )
    vocabulary = make_vocabulary(counter)
    lengths = [vocabulary.shortest, 16, 100, 333, 2_048]
    prompts = [Prompt(f"p{n}", vocabulary.write(n, f"p{n}"), input_tokens=n) for n in lengths]

    length_check = check_lengths(prompts, counter)

    assert (length_check.checked, length_check.largest_error) == (5, 0)
    assert counter.digest is not None


def test_the_words_of_prompts_are_counted_once_for_each_launch_of_a_server(tmp_path):
    counts = []

    def count(text):
        counts.append(text)
        return len(text.split())

    counter = TokenCounter(count, "/tokenize")
    launched = Target("http://127.0.0.1:9", process=LaunchedProcess(["true"], tmp_path / "log"))
    running = Target("http://127.0.0.1:9")

    first = vocabulary_of(launched, counter, "tgi")
    once = len(counts)
    assert vocabulary_of(launched, counter, "tgi") is first
    assert len(counts) == once > 0
    # Another API may add other tokens, and a server that ran before may be another one by now.
    for target, api in ((launched, "openai-chat"), (running, "tgi"), (running, "tgi")):
        before = len(counts)
        vocabulary_of(target, counter, api)
        assert len(counts) > before


def test_a_tokenizer_is_found_in_its_directory(tokenizer_file):
    by_file, by_directory = (
        open_counter(BenchConfig(tokenizer=str(path)), ControlClient("http://127.0.0.1:9"), TargetFacts("tgi"))
        for path in (tokenizer_file, tokenizer_file.parent)
    )

    assert by_file.count("the water") == by_directory.count("the water")


def test_without_a_tokenizer_file_the_server_counts():
    with stream_server() as (url, state):
        control = ControlClient(url)
        counter = open_counter(BenchConfig(), control, TargetFacts("tgi", kind=OWN))

        assert counter.count("one two three") == 4
        assert counter.source == "/tokenize"
        control.close()

    assert state.requests[-1]["body"] == {"inputs": "one two three"}


def test_a_length_check_reports_the_largest_error(tokenizer_file):
    counter = open_counter(
        BenchConfig(tokenizer=str(tokenizer_file)), ControlClient("http://127.0.0.1:9"), TargetFacts("tgi")
    )
    actual = counter.count("the water of the river")

    assert check_lengths([Prompt("p", "the water of the river", input_tokens=actual + 3)], counter).largest_error == 3


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("{}", "not a tokenizer.json")])
def test_a_wrong_tokenizer_file_is_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(UsageError) as refused:
        open_counter(BenchConfig(tokenizer=str(path)), ControlClient("http://127.0.0.1:9"), TargetFacts("tgi"))

    assert message in str(refused.value)


def test_lengths_are_forced_only_if_the_server_lists_the_extensions():
    can = TargetFacts("tgi", {"engine": {"extensions": ["min_new_tokens", "ignore_eos_token"]}}, kind=OWN)
    cannot = TargetFacts("tgi", {"model_id": "x"}, kind=TGI)

    assert choose_length_control(BenchConfig(), can) == "forced"
    assert choose_length_control(BenchConfig(length_control="capped"), can) == "capped"
    assert choose_length_control(BenchConfig(), cannot) == "capped"
    with pytest.raises(UsageError, match="TGI cannot force lengths"):
        choose_length_control(BenchConfig(length_control="forced"), cannot)


@pytest.mark.parametrize(("info", "planned"), [({"engine": {"block_size": 16}}, 0), ({}, 1)])
def test_short_random_prompts_have_no_planned_cached_tokens_if_the_server_caches_larger_blocks(info, planned):
    """Two prompts of 24 tokens have their first token in common by chance; a block of 16 tokens is not."""
    config = BenchConfig(input_tokens="24", adapter=("poems:1.0",), api="tgi")

    facts = cache_facts(config, TargetFacts("tgi", info), ControlClient("http://127.0.0.1:1"), VOCABULARY)

    work = workload.build(config, VOCABULARY, ServerLimits(), cache=replace(facts, words=1_000_000))
    plans = [prompt.planned_cached_tokens - facts.shared_tokens for prompt in itertools.islice(work.planned(), 3)]
    assert plans == ([-facts.shared_tokens] + [planned or -facts.shared_tokens] * 2)
