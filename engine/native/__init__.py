"""CPU and Triton kernels of the engine: compiled at first use, kept in the user's cache, never required.

Not here: the layers and backends that call them. Imports nothing of the engine.
"""
