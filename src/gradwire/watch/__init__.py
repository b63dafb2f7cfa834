"""`gradwire top`: what a running job does, in a terminal or on a page of this host."""
