from pathlib import Path

from reference_server.config import ServerConfig
from reference_server.config_fields import flag_of, source_of
from reference_server.launcher.settings_page import render_page

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_what_make_docs_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == "\n".join(render_page()) + "\n"


def test_the_page_has_a_row_for_every_flag() -> None:
    text = "\n".join(render_page())

    flags = [flag_of(name) for name, field in ServerConfig.model_fields.items() if source_of(field).flag]
    assert [flag for flag in flags if f"| `{flag}`" not in text] == []
