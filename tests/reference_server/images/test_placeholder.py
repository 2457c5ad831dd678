"""Text that stands for an image. tests/families compares the numbers of tokens with Transformers' processors."""

import pytest

from reference_server.images.placeholder import Tiled, VisionConfig, placeholder_of

GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
LLAVA = {"model_type": "llava_next", "vision_config": {"image_size": 336, "patch_size": 14}}


@pytest.mark.parametrize(
    ("size", "count"),
    [((20, 20), 1176), ((640, 640), 2928), ((480, 640), 2340), ((899, 1024), 2634), ((1024, 899), 2640),
     ((1067, 1600), 2144)],
)  # fmt: skip
def test_http_api_5_5_llava_next_has_the_listed_numbers_of_tokens(size: tuple[int, int], count: int) -> None:
    placeholder = placeholder_of(VisionConfig(LLAVA | {"image_grid_pinpoints": GRIDS}, {}, {}))
    assert placeholder is not None

    assert placeholder.text(*size) == "<image>" * count


def test_the_grids_of_the_processor_take_precedence() -> None:
    config = VisionConfig(LLAVA | {"image_grid_pinpoints": GRIDS}, {"image_grid_pinpoints": [[336, 672]]}, {})

    assert placeholder_of(config) == Tiled(((336, 672),), 336, 14)


def test_paligemma_has_its_start_token_after_the_last_image() -> None:
    config = {"model_type": "paligemma", "vision_config": {"image_size": 28, "patch_size": 14}}
    placeholder = placeholder_of(VisionConfig(config, {}, {}))
    assert placeholder is not None
    image = placeholder.text(9, 300)

    assert image == "<image>" * 4
    assert placeholder.join(("a", image, "b", image, "caption en")) == f"a{image}b{image}<bos>caption en\n"
    assert placeholder.join(("text", " alone")) == "text alone"


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "llava_next"}])
def test_a_model_without_described_images_has_no_placeholder(config: dict[str, object]) -> None:
    assert placeholder_of(VisionConfig(config, {}, {})) is None
