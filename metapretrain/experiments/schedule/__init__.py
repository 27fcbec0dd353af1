"""Which pretraining task next: schedulers beside each other on one encoder."""
