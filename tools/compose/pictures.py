"""Draw signs into a folder, each file named after the colour of its sign and what it says: `red-STOP.png`.

Usage: python -m tools.compose.pictures FOLDER [COUNT]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tools.signpost.scenes import SIZES, render


def draw_signs(folder: Path, count: int, seed: int = 7) -> None:
    """Save `count` pictures of several sizes with different texts that the bundled model has never seen."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, paths = random.Random(seed), dict[Path, None]()
    while len(paths) < count:
        scene = render(rng, rng.choice(SIZES), "test")
        path = folder / f"{scene.answers['colour']}-{scene.answers['text']}.png"
        scene.image.save(path)
        paths[path] = None


if __name__ == "__main__":
    draw_signs(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
