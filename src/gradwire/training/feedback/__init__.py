"""Residuals and velocities, and what substitutes missing elements."""
