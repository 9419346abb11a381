"""Quantised weights of linear layers: their arithmetic, and the formats of checkpoints that hold them.

Not here: kernels (engine.native) and the loader that puts the weights in place. May import native and checkpoints.
"""
