"""The router loads neither torch nor transformers, in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

SERVE = """
import asyncio, sys
from tests.support.servers.serving import serve
from reference_server.router.tokenizer_files import find_tokenizer_files
import reference_server.router.cli

async def main():
    async with serve() as served:
        assert (await served.generate(max_new_tokens=2)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert (await served.client.post("/v1/chat/completions", json=chat)).status_code == 200
    files = find_tokenizer_files("preset:tiny-llama")
    files.load_tokenizer().encode("hello", True)
    files.load_template()

asyncio.run(main())
print(*sorted({"torch", "transformers", "huggingface_hub", "pandas", "locust", "opentelemetry.sdk"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_serving_from_a_preset_loads_neither_torch_nor_transformers():
    root = Path(__file__).parents[3]
    loaded = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, check=True, cwd=root, timeout=60
    )

    assert loaded.stdout.split() == []
