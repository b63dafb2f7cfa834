"""How ranks meet, share an engine, and move one buffer; this room knows nothing of training."""
