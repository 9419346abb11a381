"""`triptych demo`: freshly drawn images, questions about them, and the timelines of the answers.

May import launch.cli for output, and launch.cluster.
"""
