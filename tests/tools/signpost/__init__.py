"""Tests of the bundled model, its pictures and its training code."""
