"""`gradwire doctor` and `gradwire probe`: what is wrong with hosts and the network between them."""
