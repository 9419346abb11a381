"""Benchmarks of the engine and the cluster on a GPU, each figure beside what the machine would allow."""
