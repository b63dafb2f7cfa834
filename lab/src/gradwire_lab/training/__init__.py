"""A small model in training on a lab network: what one rank does, and when."""
