"""`python -m tools.compose.flashinfer_kernels FOLDER`: compile FlashInfer's kernels while a GPU image is built.

FlashInfer's packages on PyPI hold no compiled attention. pip installs the CUDA toolkit of torch's own release into the
folder, which stays in the stage of the build. The libraries go into FlashInfer's package, where a worker finds them
without a compiler. No GPU is needed; FLASHINFER_CUDA_ARCH_LIST names those that the kernels are for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

PARTS: Final = "nvcc,cccl,cudart,curand"
"""Of the toolkit: the compiler, and the headers that FlashInfer's sources include."""


def main(folder: Path) -> int:
    """Install the toolkit and build every kernel served. Ends with a sentence where the image could not use them."""
    import torch

    if shutil.which("c++") is None:
        sys.exit("FlashInfer's kernels need a C++ compiler: set BASE_IMAGE to an image with one, such as python:3.11")
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} has no CUDA: build the GPU image from a package index with CUDA's torch")
    home = install_toolkit(folder, torch.version.cuda)
    os.environ |= {"CUDA_HOME": str(home), "LIBRARY_PATH": str(home / "lib")}
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    from tools.gpu_check import kernels

    status = kernels.main(["--served", "--install"])
    if status:
        print("the image would compute without FlashInfer, so it is not built: see the kernel that FAILED above")
    return status


def install_toolkit(folder: Path, release: str) -> Path:
    """Install the parts of CUDA's toolkit of a release, such as `13.0`; returns the toolkit's own folder.

    Exits with a sentence if pip finds none with a compiler.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    installed = subprocess.run([*command, f"cuda-toolkit[{PARTS}]=={release}.*"], check=False)
    home = folder / "nvidia" / f"cu{release.partition('.')[0]}"
    if installed.returncode != 0 or not (home / "bin" / "nvcc").exists():
        sys.exit(f"pip finds no nvcc for CUDA {release}, torch's release: take a torch for CUDA 13 or newer")
    lib = home / "lib"
    for library in (*lib.glob("libcudart.so.*"), *lib.glob("libcurand.so.*")):
        name = lib / f"{library.name.partition('.so')[0]}.so"  # the linker's own name, which packages leave out
        if not name.exists():
            name.symlink_to(library.name)
    # A library without a function is enough to link against: the driver's is the host's.
    stub = ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(lib / "libcuda.so")]
    subprocess.run(stub, check=True)
    return home


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
