from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.quantization import calibration
from tests.support.tiny_models import text_of
from tests.support.word_tokenizer import WordTokenizer


class NumberTokenizer(WordTokenizer):
    """`w7 w3` is 7, 3, as of the tiny models."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word.removeprefix("w")) for word in text.split()]


def test_windows_are_stretches_of_the_text_and_the_seed_draws_them() -> None:
    text = text_of(list(range(90)))

    first, again, other = (calibration.windows(NumberTokenizer(), text, 20, 8, seed) for seed in (0, 0, 1))

    assert all(window == list(range(window[0], window[0] + 8)) for window in first)
    assert len({window[0] for window in first}) > 5
    assert first == again != other


def test_a_text_of_exactly_one_window_is_enough_and_a_shorter_one_is_refused_with_the_numbers() -> None:
    assert calibration.windows(NumberTokenizer(), text_of([1, 2, 3]), 2, 3, 0) == [[1, 2, 3], [1, 2, 3]]

    with pytest.raises(ArgumentError, match=r"has 3 tokens, and one window has 4: .* `--seqlen`"):
        calibration.windows(NumberTokenizer(), text_of([1, 2, 3]), 2, 4, 0)


@pytest.mark.parametrize(
    ("asked", "positions", "expected"), [(None, None, 2048), (None, 16384, 2048), (None, 512, 512), (300, 512, 300)]
)
def test_windows_are_no_longer_than_the_model_takes(asked, positions, expected) -> None:
    assert calibration.window_len(asked, positions) == expected


def test_windows_that_the_model_has_no_positions_for_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"`--seqlen` is 600 but the model has 512 positions"):
        calibration.window_len(600, 512)


def test_the_hubs_text_is_its_lines_joined_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["", " = A title = ", "A line."]}), path)
    asked = []

    def fetch(dataset: str, name: str) -> str:
        asked.append((dataset, name))
        return str(path)

    assert calibration.read_default(fetch) == "\n\n = A title = \n\nA line."
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1/train-00000-of-00001.parquet")]


def test_without_the_hub_the_error_says_what_to_give_instead() -> None:
    def offline(dataset: str, name: str) -> str:
        raise OSError("the hub is out of reach\nand much advice")

    with pytest.raises(
        StartupError, match=r"\(the hub is out of reach\): give a text .* `--calibration-file`"
    ) as raised:
        calibration.read_default(offline)
    assert "wikitext-2-raw-v1" in str(raised.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")

    for name in ("picture", "nothing"):
        with pytest.raises(ArgumentError, match=rf"`--calibration-file .*{name}` cannot be read as text"):
            calibration.read_text(tmp_path / name)
