"""A picture of what TensorBoard shows of finished runs, taken by a headless Chromium.

    metapretrain demo
    python docs/screenshot.py runs/demo/digits-demo --tab scalars --size 1120,680 --out docs/figures/tensorboard.png

Needs a browser (Debian: apt-get install chromium) and nothing else that the project does not install.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TABS = ("timeseries", "scalars", "images", "hparams", "projector")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(address: str, runs: int, seconds: float = 60) -> None:
    """Wait until TensorBoard has read that many runs, and found the points of its projector, which it does last."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{address}/data/runs", timeout=5) as answer:
                found = len(json.load(answer))
            with urllib.request.urlopen(f"{address}/data/plugins_listing", timeout=5) as answer:
                projector = json.load(answer).get("projector", {}).get("enabled", False)
            if found >= runs and projector:
                return
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.5)
    raise SystemExit(f"TensorBoard did not show {runs} runs and their points in {seconds:.0f} s")


def screenshot(browser: str, address: str, file: Path, size: str) -> None:
    """Write what the browser shows at `address` after 20 seconds of the page's own time."""
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--use-angle=swiftshader",
            "--enable-unsafe-swiftshader",
            f"--user-data-dir={profile}",
            f"--window-size={size}",
            "--virtual-time-budget=20000",
            f"--screenshot={file}",
        ]
        subprocess.run([browser, *options, address], check=True, capture_output=True, timeout=180)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(64)  # a few flat colours: a third of the bytes
    small.save(file, optimize=True)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="a folder of runs, such as runs/demo/digits-demo")
    parser.add_argument("--tab", choices=TABS, default="timeseries", help="default: timeseries")
    parser.add_argument("--query", default="", help="added to the tab, such as tagFilter=accuracy")
    parser.add_argument("--size", default="1400,900", help="pixels (default: 1400,900)")
    parser.add_argument("--out", type=Path, required=True, help="the PNG")
    return parser.parse_args(argv)


def main() -> int:
    """Start TensorBoard, take the picture, stop TensorBoard."""
    options = options_of(None)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser found ({', '.join(BROWSERS)}); on Debian: apt-get install chromium")
    folders = len({path.parent for path in options.runs.rglob("events.out.tfevents.*")})
    if not folders:
        raise SystemExit(f"no TensorBoard events below {options.runs}; first: metapretrain demo")
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(options.runs), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(address, folders)
        page = f"{address}/?darkMode=false{'&' if options.query else ''}{options.query}#{options.tab}"
        screenshot(browser, page, options.out.absolute(), options.size)
    finally:
        server.terminate()
        server.wait()
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
