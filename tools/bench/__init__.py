"""Measures a cluster against the same engine in one process, and against transformers' `generate`, in one run."""
