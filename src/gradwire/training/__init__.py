"""Training with DDP: `attach`, the communication hook, and what a step does to its gradients."""
