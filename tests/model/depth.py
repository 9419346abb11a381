"""How thorough the model is: quick by default; with MODEL_DEPTH=deep (`make model`) as long as it takes."""

from __future__ import annotations

import os
from typing import Final

DEEP: Final = os.environ.get("MODEL_DEPTH") == "deep"
