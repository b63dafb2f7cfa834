"""gradwire's lab: networks on one machine, contests on them, and what they show."""
