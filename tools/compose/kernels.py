"""Compile the CPU kernels while an image is built: its workers have no compiler. Says where they are, or why not."""

from __future__ import annotations

from engine.native.build import KernelsUnavailableError, compiled_kernels


def main() -> None:
    try:
        print(f"CPU kernels: {compiled_kernels()}")
    except KernelsUnavailableError as error:
        print(f"without CPU kernels: {error}")


if __name__ == "__main__":
    main()
