"""Attention over a paged cache: the interface of backends, four of them, and the choice between them.

Not here: the layers that call attention (engine.models). May import native, device and state.
"""
