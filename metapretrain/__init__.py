"""Meta-learning for pretraining."""

__version__ = "0.1.0"
