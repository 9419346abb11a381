"""The GPU check's environment report, shapes of models and attention, and kernels of FlashInfer built ahead of use.

The tests of a GPU are those that pytest marks `gpu`; its benchmarks are in tools.bench.gpu.
"""
