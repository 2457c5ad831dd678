"""The phase of a starting server, from lines of its log."""

import doctest
from pathlib import Path

import pytest

from loadgen.target.launched import start_phase
from loadgen.target.launched.start_phase import phase_in, waiting_line


def test_the_examples_hold():
    assert doctest.testmod(start_phase).failed == 0


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("INFO launcher: Downloading the weights of org/model", "downloading weights"),
        ("INFO launcher: Waiting for shard(s) 0 to be ready", "loading weights"),
        ('{"level":"INFO","message":"compiling the CPU kernels into /cache/kernels.so"}', "compiling kernels"),
        ("INFO text_generation_router: Warming up model", "warming up"),
        ("(EngineCore pid=7) INFO Starting to load model org/model...", "loading weights"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2", "loading weights"),
        ("INFO Dynamo bytecode transform time: 4.26 s", "compiling kernels"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%", "capturing CUDA graphs"),
        ("common_init_from_params: warming up the model with an empty run", "warming up"),
        ("load_tensors: loading model tensors, this can take a while... (mmap = true)", "loading weights"),
        ("INFO Listening on 127.0.0.1:8080", ""),
    ],
)
def test_a_line_of_a_log_names_the_phase(line: str, phase: str):
    assert phase_in(line) == phase


def test_pages_2_the_last_phase_of_the_log_is_shown(tmp_path: Path):
    log = tmp_path / "server.log"

    before = waiting_line(5.2, log)
    log.write_text("Downloading the weights of org/model\nWaiting for 1 shard(s)\n12 blocks\n")

    assert before == "waiting for the server, 5 s"
    assert waiting_line(10.4, log) == "waiting for the server: loading weights, 10 s"
