"""Plain values that every room uses: plans, reports, settings, errors."""
