"""The `sitecustomize` of traced processes: records the functions of TRACE_ROOT that run while TRACE_DIR/flag exists.

When the flag goes, the functions of its phase are written to TRACE_DIR, a file per process.
"""

import os
import sys
import threading
import time
from types import FrameType


def record(folder: str, root: str) -> None:
    """Watch every thread of this process from now on."""
    phase, seen = "", set[str]()

    def call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if phase and event == "call" and code.co_filename.startswith(root) and "/.venv/" not in code.co_filename:
            seen.add(f"{code.co_filename[len(root) :]}\t{code.co_qualname}\n")

    def poll() -> None:
        nonlocal phase
        while True:
            try:
                with open(f"{folder}/flag") as flag:
                    now = flag.read()
            except OSError:
                now = ""
            if now != phase:
                ended, phase = phase, now  # first: other threads stop adding
                if ended:
                    with open(f"{folder}/{ended}.{os.getpid()}.txt", "w") as out:
                        out.write("\t".join(sys.orig_argv) + "\n" + "".join(sorted(seen)))
                seen.clear()
            time.sleep(0.05)

    threading.Thread(target=poll, daemon=True).start()
    threading.setprofile(call)
    sys.setprofile(call)


if os.environ.get("TRACE_DIR"):
    record(os.environ["TRACE_DIR"], os.environ["TRACE_ROOT"])
