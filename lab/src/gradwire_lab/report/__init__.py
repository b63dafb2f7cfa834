"""Pages and tables of runs of the lab."""
