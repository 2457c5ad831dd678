"""The number of image tokens of an image, compared with what Transformers' image processors and models make of it."""

import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoImageProcessor, PaliGemmaProcessor, PreTrainedTokenizerFast

from reference_server.images.decode import MAX_RATIO
from reference_server.images.placeholder import Merged, Prefixed, Split, VisionConfig

SIZES = [*itertools.product((7, 24, 63, 364, 500, 1457), repeat=2), (33, 2000), (4100, 900)]


def test_the_tiles_of_idefics_3_are_those_of_the_processor(tmp_path: Path) -> None:
    settings = {"size": {"longest_edge": 160}, "max_image_size": {"longest_edge": 40}}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Idefics3ImageProcessor", **settings})
    )
    process = AutoImageProcessor.from_pretrained(tmp_path)
    config = VisionConfig({"model_type": "idefics3", "vision_config": {"patch_size": 10}}, settings, {})
    placeholder = Split.of(config)

    for height, width in SIZES:
        found = process(
            images=[[np.zeros((height, width, 3), np.uint8)]], return_tensors="pt", return_row_col_info=True
        )
        rows, columns = found["rows"][0][0], found["cols"][0][0]
        text = placeholder.text(height, width)
        assert text.count("<image>") == 4 * (rows * columns + 1), (height, width)
        assert (f"<row_{rows}_col_{columns}>" in text) == (rows > 0), (height, width)


def test_the_grids_of_qwen2_vl_are_those_of_the_processor(tmp_path: Path) -> None:
    settings = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 200_704}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **settings})
    )
    process = AutoImageProcessor.from_pretrained(tmp_path)
    placeholder = Merged.of(VisionConfig({}, settings, {}))

    for height, width in SIZES:
        if max(height, width) > MAX_RATIO * min(height, width):
            continue
        found = process(images=[np.zeros((height, width, 3), np.uint8)], return_tensors="pt")
        _, rows, columns = found["image_grid_thw"][0].tolist()
        assert placeholder.grid(height, width) == (rows // 2, columns // 2), (height, width)


def test_prompts_of_paligemma_are_those_of_the_processor(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "SiglipImageProcessor", "image_seq_length": 4})
    )
    vocab = {token: number for number, token in enumerate(("<unk>", "<bos>", "<image>", "\n", " ", "cat", "dog"))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[ \n]"), "isolated")
    tokenizer.add_special_tokens(["<bos>", "<image>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")
    process = PaliGemmaProcessor(AutoImageProcessor.from_pretrained(tmp_path), fast)
    placeholder = Prefixed.of(VisionConfig({"vision_config": {"image_size": 28}}, {}, {}))
    image = np.zeros((9, 7, 3), np.uint8)

    for texts in (("", "cat dog"), ("dog ", "", " cat"), ("cat", "")):
        images = [image] * (len(texts) - 1)
        expected = process(images=[images], text=["<image>".join(texts)])["input_ids"][0]
        parts = [part for text in texts for part in (placeholder.text(9, 7), text)][1:]
        assert tokenizer.encode(placeholder.join(parts), add_special_tokens=False).ids == expected, texts
