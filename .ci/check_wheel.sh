#!/bin/sh
# Install a wheel into a new environment outside of the checkout, and look whether what it should bring is there:
# version, both bundled models, the samples, the command line. Without torch: the proxy's packages alone.
# Usage: .ci/check_wheel.sh WHEEL VERSION
set -eu
wheel=$(readlink -f "$1") version=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "$wheel"
# A folder of the user with a name of ours does no harm.
mkdir common engine
test "$(venv/bin/triptych --version)" = "triptych $version"
venv/bin/triptych samples files >/dev/null
test "$(cat files/number.txt)" = "one thousand two hundred four"
venv/bin/python -P - <<'EOF'
from common.model_info import load_model_info
from engine.models.checkpoint_index import read_index

for name in ("signpost", "numerals"):
    info = load_model_info(name)
    assert "site-packages" in str(info.folder), info.folder
    assert read_index(info.folder), name
EOF
echo "checked: $(basename "$wheel"), $(du -h "$wheel" | cut -f1)"
