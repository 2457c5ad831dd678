"""The launcher with the two stub programs for children: `python stub_launch.py FLAGS…`."""

import sys
from pathlib import Path

from reference_server.launcher.children import Programs
from reference_server.launcher.cli import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    programs = Programs(
        server=(sys.executable, str(HERE / "stub_server.py")), router=(sys.executable, str(HERE / "stub_router.py"))
    )
    sys.exit(main(programs=programs))
