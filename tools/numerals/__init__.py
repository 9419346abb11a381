"""Numerals, the bundled encoder-decoder of text: its questions, its training and its evaluation."""
