"""Values that every room shares: requests and sequences, inputs of a step, sizes of a decoder, messages of an engine.

Not here: decisions and tensors of a model. Imports nothing of the engine.
"""
