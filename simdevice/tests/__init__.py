"""Tests of the simulated device, and of training on it; what their ranks run stands beside them."""
