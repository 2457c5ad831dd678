from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_fields import flag_of, source_of
from reference_server.launcher.settings_page import render_page


def test_the_page_has_a_row_for_every_flag() -> None:
    text = "\n".join(render_page())

    flags = [flag_of(name) for name, field in ServerConfig.model_fields.items() if source_of(field).flag]
    assert [flag for flag in flags if f"| `{flag}`" not in text] == []
