"""What is owed to the gradients: residuals, velocities, and what fills gaps."""
