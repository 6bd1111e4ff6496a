"""An algo as a PyTorch operator for other programs."""
