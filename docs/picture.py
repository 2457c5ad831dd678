"""Writes a picture of the first screen of a page: `python docs/picture.py PAGE docs/images/study.png`."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 700
HEIGHT_OF_BARS = 200
"""A window of a browser without a screen is higher than its page; the rest of the picture is cut off."""
MAX_COLOURS = 64


def take_picture(page: Path, picture: Path) -> None:
    """Write the first screen of the page in light colours as a PNG. Raises SystemExit without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser on the PATH: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as directory:
        whole = Path(directory) / "whole.png"
        command = (
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--blink-settings=preferredColorScheme=1", f"--user-data-dir={directory}/profile"),
            *(f"--window-size={WIDTH},{HEIGHT + HEIGHT_OF_BARS}", f"--screenshot={whole}", page.resolve().as_uri()),
        )
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(whole) as image:
            first_screen = image.convert("RGB").crop((0, 0, WIDTH, HEIGHT))
    first_screen.quantize(MAX_COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, metavar="PAGE", help="report.html of a run, a series or a study")
    parser.add_argument("picture", type=Path, metavar="PNG", help="the picture to write")
    args = parser.parse_args()
    if not args.page.is_file():
        sys.exit(f"{args.page}: no such page")
    take_picture(args.page, args.picture)
