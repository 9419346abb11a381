"""Compile the CPU kernels while an image is built: its workers have no compiler. Says where they are, or why not."""

from __future__ import annotations

from engine.native.build import QUANTISED, STEPS, KernelsUnavailableError, compiled_kernels


def main() -> None:
    for source in (*STEPS, QUANTISED):
        try:
            print(f"CPU kernels: {compiled_kernels(source)}")
        except KernelsUnavailableError as error:
            print(f"without {source.path.name}: {error}")


if __name__ == "__main__":
    main()
