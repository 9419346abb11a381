#!/bin/sh
# flashinfer.sh FOLDER: compiles FlashInfer's kernels while a GPU image is built.
# FlashInfer's packages on PyPI hold no compiled attention. pip installs the CUDA toolkit of torch's own release into the
# folder, which stays in the stage of the build. The libraries go into FlashInfer's package, where a worker finds them
# without a compiler. No GPU is needed: FLASHINFER_CUDA_ARCH_LIST names those that the kernels are for.
set -eu
folder=$1

die() {
    echo "$1" >&2
    exit 1
}

command -v c++ >/dev/null ||
    die "FlashInfer's kernels need a C++ compiler: set BASE_IMAGE to an image with one, such as python:3.11"
release=$(python -c 'import torch; print(torch.version.cuda or "")')
[ -n "$release" ] || die "torch has no CUDA: build the GPU image from a package index with CUDA's torch"

export CUDA_HOME="$folder/nvidia/cu${release%%.*}"
export LIBRARY_PATH="$CUDA_HOME/lib"
python -m pip install --quiet --target "$folder" "cuda-toolkit[nvcc,cccl,cudart,curand]==$release.*" || :
[ -x "$CUDA_HOME/bin/nvcc" ] ||
    die "pip finds no nvcc for CUDA $release, torch's release: take a torch for CUDA 13 or newer"

for name in cudart curand; do # as the linker asks for them, which the packages leave out
    for library in "$CUDA_HOME/lib/lib$name.so."*; do ln -sf "$library" "$CUDA_HOME/lib/lib$name.so"; done
done
# A library without a function is enough to link against: the driver's is the host's.
cc -shared -x c /dev/null -o "$CUDA_HOME/lib/libcuda.so"
python -m tools.gpu_check.kernels --served --install ||
    die "the image would compute without FlashInfer, so it is not built: see the kernel that FAILED above"
