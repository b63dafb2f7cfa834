"""In `gradwire demo` a model trains over a bursting network, on TCP and gradwire in turn."""

from gradwire_lab.demo.command import app

__all__ = ["app"]
