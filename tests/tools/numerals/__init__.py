"""Tests of the bundled encoder-decoder of text, its questions and its training code."""
