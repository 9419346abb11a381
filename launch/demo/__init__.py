"""`triptych demo`: images new to the model, questions about them, and timelines of the answers; numbers and dates.

Not here: the processes (launch.cluster). May import launch.cli for output, launch.cluster and common.
"""
