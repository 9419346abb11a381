"""Untrusted media bytes to pixels and samples. Damage raises TriptychError("bad_media").

Not here: the inputs of a model (engine.processors). Imports nothing of the engine.
"""
