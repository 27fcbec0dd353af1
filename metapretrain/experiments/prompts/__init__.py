"""Soft prompts for a frozen language model, pretrained and tuned."""
