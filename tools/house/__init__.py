"""Ratchets that keep the code base small and readable: sizes, names, prose, and the functions that one request runs.

Tools of the workshop alone; they read the repository's files and start a cluster, and import nothing of the product.
"""
