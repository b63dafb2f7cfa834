"""In contests on a lab network contestants move buffers in turn, and are timed."""
