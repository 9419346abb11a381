"""A long run under mixed load with cancels and kills: is memory flat, every answer right, and all given back?"""
