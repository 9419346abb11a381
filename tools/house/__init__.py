"""Ratchets that keep the code base small and readable: sizes, names, prose, and the functions that one request runs.

Tools of the workshop alone: `measure` reads files, `trace` runs a cluster, `pages` prints tables of the reference.
"""
