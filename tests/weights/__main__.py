"""`python -m tests.weights` converts the checkpoints and prints their folders."""

from __future__ import annotations

from tests.weights.cache import CHECKPOINTS, checkpoint

if __name__ == "__main__":
    for name in CHECKPOINTS:
        print(checkpoint(name))
