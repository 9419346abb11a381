"""The decoders, written for flattened batches; the encoders, which are transformers' own modules; and their loader."""
