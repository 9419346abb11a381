"""The encoders, one file per family: transformers' own modules, run in encoder workers only."""
