"""Would pip install a CUDA build of torch here? Asked before anything is downloaded; needs only pip.

Usage: check_torch.py CONSTRAINTS. Exits with 1 and a way out if so.
"""

import json
import platform
import subprocess
import sys

from pip._vendor.packaging.requirements import Requirement

WAY_OUT = """\
The package index offers only a CUDA build of torch ({version}), several gigabytes, and there is no GPU here.
Add an index that has CPU builds (pytorch.org's install page, "CPU", shows its address), then run make again:
    export PIP_EXTRA_INDEX_URL=<that address>
Or take the CUDA build all the same: make CUDA=1 …"""


def main(constraints: str) -> int:
    """Resolve torch as the install would, and look at what that build requires."""
    if platform.system() != "Linux":
        return 0  # builds for other systems bring no CUDA packages
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    report = subprocess.run(
        [*command, "--report", "-", "-c", constraints, "torch"], stdout=subprocess.PIPE, check=False
    )
    if report.returncode != 0:
        return report.returncode  # pip has said why
    metadata = json.loads(report.stdout)["install"][0]["metadata"]
    requirements = [Requirement(text) for text in metadata.get("requires_dist", [])]
    needed = [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    if any(name.startswith(("nvidia", "cuda")) for name in needed):
        print(WAY_OUT.format(version=metadata["version"]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
