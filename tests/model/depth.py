"""How thorough the model is: quick by default; with MODEL_DEPTH=deep (`make model`) as long as it takes.

MODEL_STORIES is how many stories wander for each topology, from seed MODEL_SEED on; where only the first is given, they
begin at a seed that is drawn. A story that fails tells its seed.
"""

from __future__ import annotations

import os
import random
from typing import Final

DEEP: Final = os.environ.get("MODEL_DEPTH") == "deep"

_STORIES: Final = os.environ.get("MODEL_STORIES")
_SEED: Final = os.environ.get("MODEL_SEED")


def seeds(few: int) -> range:
    """Those of the stories to tell: as many as are asked for, else `few`."""
    if _STORIES is None and not DEEP:
        return range(few)
    first = random.randrange(10**9) if _SEED is None else int(_SEED)
    print(f"MODEL_SEED={first}")
    return range(first, first + int(_STORIES or 1000))
