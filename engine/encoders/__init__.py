"""Encoders, a file per family: transformers' own modules, run in workers that encode. May import engine.models and
below."""
