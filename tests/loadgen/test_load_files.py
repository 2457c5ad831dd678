import dataclasses

from loadgen import workload
from loadgen.config import BenchConfig
from loadgen.datasets.prompt import Limits
from loadgen.datasets.vocabulary import calibrate
from loadgen.load_files import pack, unpack
from tests.loadgen.test_deal import count_words


def moved(config, directory):
    directory.mkdir()
    return config.model_copy(update=unpack(pack(config), directory))


def test_a_load_made_from_copies_of_its_files_is_the_same_load(tmp_path):
    (tmp_path / "lengths.txt").write_text("4\n7\n9\n")
    (tmp_path / "asked.txt").write_text("one\ntwo\n")
    lengths = f"empirical:{tmp_path / 'lengths.txt'}"
    written = BenchConfig(input_tokens=lengths, output_tokens="3")
    asked = BenchConfig(workload="prompts", prompts_file=str(tmp_path / "asked.txt"), output_tokens=lengths)

    for number, config in enumerate((written, asked)):
        copied = moved(config, tmp_path / str(number))

        assert copied != config
        works = [workload.build(each, calibrate(count_words), Limits()) for each in (config, copied)]
        assert works[0].digest == works[1].digest
        assert list(map(dataclasses.asdict, works[0].first(5))) == list(map(dataclasses.asdict, works[1].first(5)))


def test_a_load_of_no_file_packs_nothing():
    assert pack(BenchConfig(input_tokens="uniform:4,9")) == {}
