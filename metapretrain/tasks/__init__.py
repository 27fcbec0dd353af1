"""Pretraining objectives, and the image experiment that is made of them."""
