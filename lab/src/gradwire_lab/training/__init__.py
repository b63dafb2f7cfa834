"""A small model trains on a lab network, for the demo and for training scenarios."""
