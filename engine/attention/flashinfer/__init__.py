"""The attention backend on FlashInfer's kernels.

Not here: the choice between backends (engine.attention.select), attention without FlashInfer. May import the modules
beside this folder, and what `engine.attention` may.
"""
