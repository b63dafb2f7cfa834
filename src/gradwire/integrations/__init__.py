"""Callbacks for frameworks, each in a module of its own that imports its framework.

`gradwire` depends on none of them, and none is imported unless its module is.
"""
