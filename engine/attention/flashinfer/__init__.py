"""The attention backend on FlashInfer's kernels. May import what `engine.attention` may."""
