"""Decoders, written for flattened batches, their layers, and the loader of weights.

Not here: encoders (engine.encoders) and attention kernels. May import native, processors, device and state.
"""
