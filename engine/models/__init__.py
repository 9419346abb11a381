"""Decoders, written for flattened batches, and the loader of weights. Encoders are transformers' own modules
(engine.encoders)."""
