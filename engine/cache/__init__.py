"""Memory that outlives a step: blocks of KV, prefixes, encoder outputs before use, outputs kept by an encoder.

Not here: the KV tensors themselves (engine.runner). May import processors and state.
"""
