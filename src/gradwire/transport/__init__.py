"""How ranks meet, share an engine, and move one buffer: nothing here knows of training."""
