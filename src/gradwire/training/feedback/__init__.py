"""What is owed to gradients (residuals, velocities), and what substitutes missing elements."""
