"""Images in the Markdown of a prompt."""

import pytest

from reference_server.errors import ValidationError
from reference_server.images.markdown import ImageSource, chunks_of_flat, image_of_data_url, split_prompt
from reference_server.messages import Image


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("plain", ["plain"]),
        ("", []),
        ("a ![](u) b", ["a ", ImageSource("u"), " b"]),
        ("![](u)![](v)", [ImageSource("u"), ImageSource("v")]),
        ("![](unclosed", ["![](unclosed"]),
        ("![caption](u)", ["![caption](u)"]),
        ("x ![]()", ["x ", ImageSource("")]),
    ],
)
def test_a_prompt_is_split_at_images_without_a_caption(prompt: str, parts: list[str | ImageSource]) -> None:
    assert list(split_prompt(prompt)) == parts


def test_many_openings_without_an_end_are_one_text() -> None:
    prompt = "![](" * 200_000

    assert list(split_prompt(prompt)) == [prompt]


def test_a_data_url_is_an_image() -> None:
    assert image_of_data_url("data:image/png;base64,AAEC") == Image(b"\0\1\2", "image/png")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,AAEC", "invalid image content: data:image/png,AAEC"),
        ("data:image/png;x;base64,AAEC", "invalid image content: data:image/png;x;base64,AAEC"),
        ("ftp://host/a.png", "invalid image content: ftp://host/a.png"),
        ("file:///etc/passwd", "invalid image content: file:///etc/passwd"),
        ("data:image/png;base64,A", "base64 encoding is invalid: "),
    ],
)
def test_reliability_42_other_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValidationError, match=f"Input validation error: {message}"):
        image_of_data_url(url)


def test_a_flat_prompt_keeps_links_to_other_addresses_as_text() -> None:
    prompt = "a ![](data:image/png;base64,AAEC) b ![](http://host/c.png)![](data:image/png;base64,?)"

    assert chunks_of_flat(prompt) == (
        "a ", Image(b"\0\1\2", "image/png"), " b ", "![](http://host/c.png)", "![](data:image/png;base64,?)",
    )  # fmt: skip


def test_the_mimetype_of_a_tgi_warm_up_is_read() -> None:
    assert chunks_of_flat("![](data:image/jpeg;base64;base64,AAEC)") == (Image(b"\0\1\2", "image/jpeg"),)
