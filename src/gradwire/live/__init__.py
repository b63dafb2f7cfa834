"""The state of a running job, which its processes offer to readers on the same host."""
