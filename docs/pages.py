"""Writes the generated pages of this folder: `python docs/pages.py`."""

import importlib
from pathlib import Path

MODULES = {
    "settings.md": "reference_server.launcher.settings_page",
    "support.md": "reference_server.model_server.support_page",
    "profiles.md": "tuner.servers.profiles_page",
    "load-settings.md": "loadgen.config.load_settings_page",
    "space.md": "tuner.space.space_page",
    "plan.md": "tuner.commands.plan_page",
    "server-metrics.md": "reference_server.router.telemetry.server_metrics_page",
    "metrics.md": "reports.reference.metrics_page",
    "files.md": "reports.reference.files_page",
}


def render(page: str) -> str:
    """The text of a page: the lines of `render_page` of its module."""
    return "\n".join(importlib.import_module(MODULES[page]).render_page()) + "\n"


if __name__ == "__main__":
    for page in MODULES:
        Path(__file__).with_name(page).write_text(render(page), encoding="utf-8")
