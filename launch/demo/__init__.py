"""`triptych demo`: freshly drawn images, questions about them, and timelines of the answers.

May import launch.cli for output, and launch.cluster.
"""
