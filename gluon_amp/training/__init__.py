"""Training: loss scalers on trainers, and their checkpoints."""
