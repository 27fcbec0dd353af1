"""Images: pretraining by prototypes and its baselines."""
