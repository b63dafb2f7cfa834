"""Contests on a lab network: what moves buffers, on which ranks, in turn, and how it is timed."""
