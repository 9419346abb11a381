"""What a GPU is for: a check that runs on a bare machine, what has to be carried there, and the figures."""
