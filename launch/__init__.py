"""Starting and operating: the command line, a local cluster under a supervisor, the demo.

Does not belong here: anything that a request passes through. May import every room except tools.
"""
