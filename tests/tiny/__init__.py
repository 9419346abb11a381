"""Small random checkpoints of families that joined later: a module each, from the parts of tests/tiny_models.py."""
