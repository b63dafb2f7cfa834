"""The lab makes networks on one machine, and races contestants on them."""
