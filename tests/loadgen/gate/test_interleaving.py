"""Interleaved slices: the order of launches and slices, the texts, retries, and refusals by name."""

import contextlib
import math

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, StartError, UsageError
from loadgen.gate.interleaving import InterleavedSlices, check_interleaving
from loadgen.gate.pairing import Gate
from loadgen.gate.sides import CommandServer, LiveSide, read_side
from loadgen.progress import SilentProgress
from reports.gate.comparison import CompareOptions
from reports.gate.decide import GateDecision
from reports.gate.side_run import SideRun

SIDES = (LiveSide("a", "old", CommandServer(("a",))), LiveSide("b", "new", CommandServer(("b",))))
METRICS = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
LOAD = BenchConfig()


class FakeServers:
    """Servers on a machine that slows down from slice to slice; side B is slower by a factor.

    `log` holds every launch, slice and stop in order; `salts` the salt of each slice; `reads` the slices whose metrics
    were read, each with the length of the log at that time.
    """

    def __init__(self, slowdown=1.0, drift=0.0, invalid=(), no_start=()):
        self.slowdown, self.drift, self.invalid, self.no_start = slowdown, drift, set(invalid), set(no_start)
        self.log, self.salts, self.reads = [], {}, []

    @contextlib.contextmanager
    def launch(self, side, log):
        if side.letter in self.no_start:
            raise StartError("out of memory")
        self.log.append(f"launch {side.letter}")
        yield FakeServer(self, side)
        self.log.append(f"stop {side.letter}")

    def salt_of(self, text):
        return f"base:{text}"


class FakeServer:
    pid = 1

    def __init__(self, servers, side):
        self.servers, self.side = servers, side

    def measured(self, directory, salt):
        run = self.run(directory, salt)

        def read():
            self.servers.reads.append((directory.name, len(self.servers.log)))
            return run

        return read

    def run(self, directory, salt):
        servers = self.servers
        assert salt not in servers.salts.get(self.side.letter, set()), "a server gets the same texts twice"
        servers.salts.setdefault(self.side.letter, set()).add(salt)
        servers.log.append(directory.name)
        factor = math.exp(servers.drift * len(servers.log)) * (servers.slowdown if self.side.letter == "b" else 1.0)
        values = {"output_tokens_per_s": 1000 / factor, "ttft_p50_ms": 20 * factor, "tpot_p50_ms": 5 * factor}
        status = "invalid" if directory.name in servers.invalid else "valid"
        reasons = ("too few",) if status == "invalid" else ()
        return SideRun(self.side.label, {**values, "error_rate": 0.0}, status, reasons, directory=directory)


def interleaved(servers, tmp_path, slices=4, memory=lambda pid: None):
    return InterleavedSlices(slices, servers, tmp_path, SilentProgress(), memory)


def test_trust_C5_gate_slices_alternate_between_two_servers_that_are_launched_once(tmp_path):
    servers = FakeServers()
    measure = interleaved(servers, tmp_path)

    for number in (1, 2):
        measure(number, SIDES)

    first, second = servers.log[:12], servers.log[12:]
    assert first[:2] == ["launch a", "launch b"]
    assert [name[-1] for name in first[2:10]] == list("abbaabba")
    assert first[10:] == ["stop b", "stop a"]
    assert second[:2] == ["launch b", "launch a"]
    assert [name[-1] for name in second[2:10]] == list("baabbaab")


def test_trust_C5_gate_both_slices_of_a_slice_pair_send_the_same_texts_and_no_server_gets_a_text_twice(tmp_path):
    servers = FakeServers()

    interleaved(servers, tmp_path)(1, SIDES)

    assert servers.salts["a"] == servers.salts["b"]
    assert len(servers.salts["a"]) == 4


def test_trust_C5_gate_a_steady_drift_of_the_machine_cancels_within_a_pair(tmp_path):
    servers = FakeServers(slowdown=1.05, drift=0.05)

    pair = interleaved(servers, tmp_path)(1, SIDES)

    assert pair.b.values["tpot_p50_ms"] / pair.a.values["tpot_p50_ms"] == pytest.approx(1.05)
    assert len(pair.slices) == 4


def test_an_invalid_slice_is_repeated_on_both_sides_with_new_texts(tmp_path):
    servers = FakeServers(invalid=["pair01-slice02-a"])

    pair = interleaved(servers, tmp_path)(1, SIDES)

    assert servers.log[4:6] == ["pair01-slice02-b", "pair01-slice02-a"]
    assert servers.log[10:12] == ["pair01-slice02-b-again1", "pair01-slice02-a-again1"]
    assert pair.is_valid


def test_the_metrics_of_slices_are_read_after_the_last_slice_and_those_of_the_first_at_once(tmp_path):
    servers = FakeServers()

    interleaved(servers, tmp_path)(1, SIDES)

    assert [done for _, done in servers.reads] == [4, 4, 10, 10, 10, 10, 10, 10]
    assert {name for name, _ in servers.reads[:2]} == {"pair01-slice01-a", "pair01-slice01-b"}


def test_a_first_slice_that_is_invalid_twice_ends_the_pair_before_the_others(tmp_path):
    servers = FakeServers(invalid=["pair01-slice01-a", "pair01-slice01-a-again1"])

    pair = interleaved(servers, tmp_path)(1, SIDES)

    assert not pair.is_valid
    assert servers.log[6:] == ["stop b", "stop a"]


def test_a_slice_that_is_invalid_twice_ends_the_pair_and_the_gate(tmp_path):
    servers = FakeServers(invalid=["pair01-slice02-a", "pair01-slice02-a-again1"])

    result = Gate(tmp_path, CompareOptions(), SilentProgress()).run(SIDES, interleaved(servers, tmp_path))

    assert result.exit_code == 4
    assert "pair 1, A (old) is invalid: too few" in result.comparison.refusals[0].message
    assert servers.log[-2:] == ["stop b", "stop a"]


def test_trust_C5_gate_a_comparison_of_slices_names_them_and_keeps_every_run(tmp_path):
    options = CompareOptions(gated=METRICS, shown=(), pairs=4)
    servers = FakeServers(slowdown=1.1)

    result = Gate(tmp_path, options, SilentProgress()).run(SIDES, interleaved(servers, tmp_path))

    assert result.comparison.verdict is GateDecision.REGRESSION
    assert result.comparison.size == "4 pairs of launches with 4 interleaved slices a side"
    assert [len(runs) for runs in (result.runs_a, result.runs_b)] == [16, 16]
    assert len({run.directory for run in (*result.runs_a, *result.runs_b)}) == 32


def test_a_second_server_that_does_not_start_names_the_remedy(tmp_path):
    with pytest.raises(MeasurementError, match=r"new does not start while the other server is up.*--interleave"):
        interleaved(FakeServers(no_start="b"), tmp_path)(1, SIDES)


def test_a_machine_with_memory_for_one_server_is_refused_before_the_second_launch(tmp_path):
    servers = FakeServers()

    with pytest.raises(MeasurementError, match="takes 3,000 MiB and 2,000 MiB of memory are free"):
        interleaved(servers, tmp_path, memory=lambda pid: (3000 * 2**20, 2000 * 2**20))(1, SIDES)

    assert servers.log == ["launch a", "stop a"] or servers.log == ["launch a"]


@pytest.mark.parametrize(
    ("a", "b", "num_gpus", "problem"),
    [
        ("http://h:1", "http://h:1/", 0, "both sides are the server http://h:1"),
        ("stored:.", "http://h:1", 0, "is stored; slices need two live sides"),
        ("command:s --port 80", "command:t --port=80", 0, "both commands set port 80"),
        ("command:s", "command:t", 1, "this machine has 1 GPU and the servers take 1 [+] 1 of the memory"),
        ("command:s --cuda-memory-fraction 0.4", "command:t", 2, "2 GPUs and the servers take 0.4 [+] 1"),
    ],
)
def test_two_sides_that_cannot_be_up_together_are_refused_by_name(a, b, num_gpus, problem):
    specs = [read_side(letter, text, None) for letter, text in (("a", a), ("b", b))]

    with pytest.raises(UsageError, match=f"`interleave` is 4 but .*{problem}"):
        check_interleaving(4, specs, LOAD, num_gpus)
    check_interleaving(None, specs, LOAD, num_gpus)


@pytest.mark.parametrize(
    ("a", "b", "num_gpus"),
    [
        ("http://h:1", "http://h:2", 1),
        ("command:s", "command:t", 0),
        ("command:s --cuda-memory-fraction 0.45", "command:t --cuda-memory-fraction=0.45", 1),
        ("command:env CUDA_VISIBLE_DEVICES=0 s", "command:env CUDA_VISIBLE_DEVICES=1 t", 2),
    ],
)
def test_two_sides_that_fit_together_are_accepted(a, b, num_gpus):
    specs = [read_side(letter, text, None) for letter, text in (("a", a), ("b", b))]

    check_interleaving(4, specs, LOAD, num_gpus)


def test_a_number_of_slices_out_of_range_is_refused():
    with pytest.raises(UsageError, match="`interleave` is 1 but must be 2 to 50"):
        check_interleaving(1, [], LOAD, 0)
