"""Runs of the lab are shown here as pages and tables."""
