import dataclasses

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.generator.worker_messages import pack_files, unpack_files
from loadgen.workloads import workload
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.prompts.vocabulary import calibrate
from tests.loadgen.generator.test_partition import count_words


def moved(config, directory):
    directory.mkdir()
    return config.model_copy(update=unpack_files(pack_files(config), directory))


def test_a_load_made_from_copies_of_its_files_is_the_same_load(tmp_path):
    (tmp_path / "lengths.txt").write_text("4\n7\n9\n")
    (tmp_path / "asked.txt").write_text("one\ntwo\n")
    lengths = f"empirical:{tmp_path / 'lengths.txt'}"
    written = BenchConfig(input_tokens=lengths, output_tokens="3")
    asked = BenchConfig(workload="prompts", prompts_file=str(tmp_path / "asked.txt"), output_tokens=lengths)

    for number, config in enumerate((written, asked)):
        copied = moved(config, tmp_path / str(number))

        assert copied != config
        works = [workload.build(each, calibrate(count_words), ServerLimits()) for each in (config, copied)]
        assert works[0].digest == works[1].digest
        assert list(map(dataclasses.asdict, works[0].first(5))) == list(map(dataclasses.asdict, works[1].first(5)))


def test_a_load_without_files_packs_nothing():
    assert pack_files(BenchConfig(input_tokens="uniform:4,9")) == {}


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "url"])
def test_hardening_S3_a_worker_writes_files_of_known_settings_only(tmp_path, name):
    with pytest.raises(ValueError, match="the master sent a file for"):
        unpack_files({name: ("", "x", b"x")}, tmp_path / "files")

    assert not (tmp_path / "escaped").exists()
