"""The way of weights into a model: from checkpoints, by a skeleton without memory, or drawn at random.

Not here: files and names of checkpoints, and the models. May import quantised and the modules beside this folder.
"""
