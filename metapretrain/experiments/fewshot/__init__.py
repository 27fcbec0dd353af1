"""Few-shot learning on images."""
