"""Signpost, the bundled model: its pictures, its training and its evaluation."""
