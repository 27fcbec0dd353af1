"""Meta-learning for pretraining."""
