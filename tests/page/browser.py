"""Chromium for the page's tests. `python -m tests.page.browser` installs it where it is missing, or says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = "the page's tests need Chromium: install it (Debian: apt-get install chromium), or set CHROMIUM to its path"


def find() -> str | None:
    """The path of a Chromium: of the variable CHROMIUM, else the first on the PATH."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def main() -> int:
    if find():
        return 0
    if shutil.which("apt-get") and os.geteuid() == 0:
        print("installing Chromium …")
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return 0 if find() else 1
    print(ADVICE, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
