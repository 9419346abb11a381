"""Benchmarks of the engine and the cluster on a GPU, each figure beside the most that the machine allows."""
