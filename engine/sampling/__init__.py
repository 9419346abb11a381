"""The choice of tokens from logits: rules, filters, draws, beams, grammars and log-probabilities.

Not here: sequences and their blocks (engine.core.decoding). May import device and state.
"""
