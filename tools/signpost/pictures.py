"""Draw the pictures of `triptych demo`, with texts new to the model, and a question about each.

Usage: python -m tools.signpost.pictures [SEED]
"""

from __future__ import annotations

import random
import sys

from launch.demo.run import PICTURES
from tools.signpost.scenes import QUESTIONS, SIZES, render

_KINDS = ("text", "colour", "text", "shape", "text", "circles")
COUNT = 32


def main(seed: int) -> None:
    """Write COUNT pictures, and `answers.txt` with a line for each: name, question, answer, separated by tabs."""
    rng, lines = random.Random(seed), []
    for number in range(COUNT):
        scene, kind = render(rng, rng.choice(SIZES), "test"), _KINDS[number % len(_KINDS)]
        name = f"picture-{number + 1}.png"
        scene.image.save(PICTURES / name, optimize=True)
        lines.append(f"{name}\t{rng.choice(QUESTIONS[kind])}\t{scene.answers[kind]}\n")
    (PICTURES / "answers.txt").write_text("".join(lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
