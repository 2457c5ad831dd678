"""The example files in docs/loads.md are read as the page describes them."""

import re
from pathlib import Path

import pytest

from loadgen.workloads.prompts.prompts_file import read_prompts
from loadgen.workloads.traces import read_azure, read_mooncake

PAGE = (Path(__file__).resolve().parents[3] / "docs/loads.md").read_text()
SECTION = PAGE.partition("## Files of prompts and traces\n")[2].partition("\n## ")[0]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The blocks of the section as files, in its order."""
    blocks = re.findall(r"^```(?:json|csv)\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    paths = [tmp_path / name for name in ("prompts.jsonl", "azure.csv", "mooncake.jsonl")]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block)
    return paths


def test_pages_3_the_documented_prompts_are_a_text_and_messages(files):
    text, chat = read_prompts(files[0])

    assert (text.text, text.output_tokens) == ("Explain paging.", 64)
    assert chat.messages == ({"role": "user", "content": "Explain chunking."},)


def test_pages_3_the_documented_traces_have_their_times_and_lengths(files):
    azure, mooncake = read_azure(files[1]), read_mooncake(files[2])

    assert [(row.input_tokens, row.output_tokens) for row in azure] == [(374, 44), (396, 109)]
    assert [row.arrival_ns for row in mooncake] == [0, 3_052_000_000]
    assert mooncake[0].hash_ids[:2] == mooncake[1].hash_ids[:2]
