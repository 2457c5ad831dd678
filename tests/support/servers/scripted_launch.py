"""Launcher and real router over stub model servers: `python -m tests.support.servers.scripted_launch FLAGS…`."""

import sys
from pathlib import Path

from reference_server.launcher.children import Programs
from reference_server.launcher.cli import main

if __name__ == "__main__":
    stub = Path(__file__).parent / "stub_server.py"
    programs = Programs(server=(sys.executable, str(stub)), router=Programs.beside(sys.executable).router)
    sys.exit(main(programs=programs))
