"""How thorough the model is: quick by default; with TRIPTYCH_MODEL=deep (`make model`) as long as it takes."""

from __future__ import annotations

import os
from typing import Final

DEEP: Final = os.environ.get("TRIPTYCH_MODEL") == "deep"
