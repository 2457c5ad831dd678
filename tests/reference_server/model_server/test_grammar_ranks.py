"""Grammars on two ranks: both walk the same states, and agree on every token and every failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, sys
from dataclasses import replace
from pathlib import Path
from reference_server.messages import ChooserParameters, GrammarType, StoppingParameters
from reference_server.model_server.distributed import Rendezvous, open_group
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_shards import warm_up

REGEXES = ["", "(", "[a-z]{3}é[0-9]{2}", '\\\\{"[a-z]{1,5}":(true|false)\\\\}']

async def main(rank, world_size):
    options = EngineOptions("preset:tiny-llama", dtype="float32", cpu_memory_gib=0.1, compute_threads=1)
    shard = LocalShard.load(options, rank, world_size)
    await warm_up(shard)
    driver = ShardDriver(shard)
    requests = []
    for id_, regex in enumerate(REGEXES):
        kind = GrammarType.REGEX if regex else GrammarType.NONE
        parameters = ChooserParameters(do_sample=True, seed=id_, grammar=regex, grammar_type=kind)
        asked = driver.request(id_, [1] * 4, parameters=parameters, stopping=StoppingParameters(20))
        requests.append(replace(asked, chunks=("Once there",), truncate=4))
    result = await driver.prefill(*requests)
    while result.batch is not None:
        result = await driver.decode(result.batch)
    shard.close()
    print(json.dumps({id_: each.generated_text and each.generated_text.text for id_, each in driver.outcomes.items()}))

rank, world_size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = open_group(rank, world_size, Rendezvous(file=Path(place)), "cpu")
asyncio.run(main(rank, world_size))
group.close()
"""


@pytest.mark.slow
def test_model_server_M15_two_ranks_agree(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), "2", str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts: dict[str, str] = {}
    for rank in ranks:
        output, _ = rank.communicate(timeout=150)
        assert rank.returncode == 0
        texts |= {id_: text for id_, text in json.loads(output.splitlines()[-1]).items() if text is not None}

    assert set(texts) == {"0", "2", "3"}
    assert len(texts["2"]) == 6
    assert isinstance(json.loads(texts["3"]), dict)
