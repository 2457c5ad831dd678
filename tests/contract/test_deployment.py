"""Image files, checked without an engine that builds them; and every test that a page names exists."""

import argparse
import json
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import loadgen.cli as bench
import tuner.cli as tune
from reference_server.configuration.config import ServerConfig
from reference_server.configuration.settings import load

ROOT = Path(__file__).parents[2]
SEED_LINE = """docker container run --gpus all --shm-size 1g -e HUGGING_FACE_HUB_TOKEN=$token -p 8080:80
 -v $volume:/data ghcr.io/huggingface/text-generation-inference:2.3.1 --model-id $model --max-batch-prefill-tokens 4800
 --max-input-length 4768 --max-total-tokens 10960 --num-shard 4"""


class Instructions(list[tuple[str, str]]):
    """A Dockerfile's instructions in order, continued lines joined."""

    @classmethod
    def read(cls, name: str) -> "Instructions":
        text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        lines = (line.split(None, 1) for line in text.splitlines() if line.strip())
        return cls((word, rest.strip()) for word, rest in lines)

    def of(self, word: str) -> list[str]:
        return [rest for each, rest in self if each == word]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for rest in self.of("ENV") for pair in shlex.split(rest))


@pytest.fixture(params=["Dockerfile", "Dockerfile.cuda"])
def image(request: pytest.FixtureRequest) -> Instructions:
    return Instructions.read(request.param)


def test_the_base_image_has_one_pinned_default_which_a_digest_replaces(image: Instructions) -> None:
    bases = [base.split()[0] for base in image.of("FROM")]

    assert bases == ["${BASE}", "${BASE}"]
    assert image[0][0] == "ARG"
    assert re.fullmatch(r"BASE=[a-z/]+:\d+\.\d+\.\d+-[a-z]+-[a-z]+", image[0][1])
    assert "@sha256:" in (ROOT / "docs/install.md").read_text()


def test_an_image_installs_packages_by_their_hashes(image: Instructions) -> None:
    commands = [words for run in image.of("RUN") for words in re.findall(r"pip install ([^&;]+)", run)]

    others = [words for words in commands if "--require-hashes -r" not in words]
    assert len(commands) - len(others) == 2
    # The wheel of the build stage, and a torch of another index.
    assert all(
        "--no-deps" in words and ("--no-index /wheels/" in words or "$TORCH_INDEX_URL" in words) for words in others
    )


def test_the_process_is_not_root_and_can_write_its_cache(image: Instructions) -> None:
    last = image[max(index for index, (word, _) in enumerate(image) if word == "FROM") :]
    words = [word for word, _ in last]

    assert image.of("USER") == ["1000:1000"]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    assert any("install -d -o tgi -g tgi /data" in run for run in image.of("RUN"))
    assert image.of("VOLUME") == ["/data"]
    assert image.of("EXPOSE") == ["80"]


def test_no_secret_and_no_package_index_is_in_a_layer(image: Instructions) -> None:
    text = "\n".join(rest for _, rest in image)

    assert not re.search(r"token|password|secret|https?://", text, re.IGNORECASE)


def test_everything_that_is_copied_exists(image: Instructions) -> None:
    sources = [name for rest in image.of("COPY") if "--from" not in rest for name in rest.split()[:-1]]

    assert sources
    assert all((ROOT / name).exists() for name in sources)


def test_the_seeds_line_launches_the_same_as_in_tgis_container(image: Instructions) -> None:
    words = shlex.split(SEED_LINE.replace("$token", "hf_x").replace("$model", "preset:tiny-llama"))
    flags = words[next(index for index, word in enumerate(words) if word.startswith("ghcr.io")) + 1 :]
    given = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "-e")

    config = load(ServerConfig, flags, image.environment | given).config

    assert json.loads(image.of("ENTRYPOINT")[0]) == ["text-generation-launcher"]
    assert config.port == 80
    assert str(config.huggingface_hub_cache) == "/data"
    assert (config.max_input_length, config.max_total_tokens, config.num_shard) == (4768, 10960, 4)
    assert config.hub_token is not None
    assert config.hub_token.get_secret_value() == "hf_x"


def test_every_test_that_the_questions_page_names_exists() -> None:
    page = (ROOT / "docs/tgi-questions.md").read_text()
    named = re.findall(r"^\* `(tests/\S+)::(\w+)`$", page, re.MULTILINE)

    assert len(named) > 25
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    assert page.count("## ") == len(re.findall(r"^## .*\n\n(?:(?!^## )[\s\S])*?^\* `tests/", page, re.MULTILINE))


PAGES = [
    "docs/concepts.md",
    "docs/migration.md",
    "docs/tgi-questions.md",
    "docs/troubleshooting.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
# Flags of docker, vLLM and SGLang, and of the checks that CONTRIBUTING.md names.
FOREIGN = {"--user", "--gpus", "--shm-size", "--enable-prompt-tokens-details", "--enable-cache-report", "--strict"}
FOREIGN |= {"--max-model-len"}


def flags_of(help_text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_text))


@cache
def flags_of_commands() -> set[str]:
    flags: set[str] = set()
    for command in [*bench.COMMANDS.values(), *tune.COMMANDS.values()]:
        parser = argparse.ArgumentParser()
        command.add_flags(parser)
        flags |= flags_of(parser.format_help())
    return flags


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_links_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    settings = flags_of((ROOT / "docs/settings.md").read_text())

    assert flags_of(text) <= settings | flags_of_commands() | FOREIGN
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_every_message_of_the_troubleshooting_page_is_one_of_the_product() -> None:
    tables = (ROOT / "docs/troubleshooting.md").read_text()
    sources = [path.read_text() for package in ("loadgen", "reports") for path in (ROOT / package).rglob("*.py")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))

    messages = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)

    assert len(messages) > 20
    assert [message for message in messages if message not in text] == []
