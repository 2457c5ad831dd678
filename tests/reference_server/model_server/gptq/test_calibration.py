from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.gptq import calibration
from tests.support.models.tiny_models import text_of
from tests.support.models.word_tokenizer import WordTokenizer


class NumberTokenizer(WordTokenizer):
    """`w7 w3` is the ids 7, 3, as in the tiny models."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word.removeprefix("w")) for word in text.split()]


def test_windows_are_parts_of_the_text_chosen_by_the_seed() -> None:
    text = text_of(list(range(90)))

    first, again, other = (calibration.windows(NumberTokenizer(), text, 20, 8, seed) for seed in (0, 0, 1))

    assert all(window == list(range(window[0], window[0] + 8)) for window in first)
    assert len({window[0] for window in first}) > 5
    assert first == again != other


def test_a_text_of_one_window_is_enough_and_a_shorter_one_is_refused() -> None:
    assert calibration.windows(NumberTokenizer(), text_of([1, 2, 3]), 2, 3, 0) == [[1, 2, 3], [1, 2, 3]]

    with pytest.raises(ArgumentError, match=r"has 3 tokens, but a window needs 4: .* `--seqlen`"):
        calibration.windows(NumberTokenizer(), text_of([1, 2, 3]), 2, 4, 0)


@pytest.mark.parametrize(
    ("seqlen", "positions", "expected"), [(None, None, 2048), (None, 16384, 2048), (None, 512, 512), (300, 512, 300)]
)
def test_windows_are_no_longer_than_the_positions_of_the_model(seqlen, positions, expected) -> None:
    assert calibration.window_len(seqlen, positions) == expected


def test_windows_longer_than_the_positions_of_the_model_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"`--seqlen` is 600 but the model has 512 positions"):
        calibration.window_len(600, 512)


def test_lines_of_the_default_text_are_joined_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["", " = A title = ", "A line."]}), path)
    fetched = []

    def fetch(dataset: str, name: str) -> str:
        fetched.append((dataset, name))
        return str(path)

    assert calibration.read_default(fetch) == "\n\n = A title = \n\nA line."
    assert fetched == [("Salesforce/wikitext", "wikitext-2-raw-v1/train-00000-of-00001.parquet")]


def test_without_the_hub_the_error_suggests_a_file() -> None:
    def offline(dataset: str, name: str) -> str:
        raise OSError("the hub is out of reach\nand much advice")

    with pytest.raises(
        StartupError, match=r"\(the hub is out of reach\): use your own text with `--calibration-file`"
    ) as raised:
        calibration.read_default(offline)
    assert "wikitext-2-raw-v1" in str(raised.value)


def test_an_unreadable_calibration_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")

    for name in ("picture", "nothing"):
        with pytest.raises(ArgumentError, match=rf"could not read `--calibration-file .*{name}` as text"):
            calibration.read_text(tmp_path / name)
