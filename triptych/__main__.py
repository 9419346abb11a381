"""`python -m triptych`: the command line, as the `triptych` script runs it."""

from __future__ import annotations

from launch.cli.app import main

if __name__ == "__main__":
    main()
