"""docs/profiles.md is the page that the profiles generate."""

from pathlib import Path

from tuner.servers.profiles_page import render_page


def test_the_page_is_generated_from_the_profiles():
    page = Path(__file__).parents[3] / "docs" / "profiles.md"

    assert page.read_text() == "\n".join(render_page()) + "\n", "run `make docs`"
