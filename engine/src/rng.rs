//! Random numbers that agree with PyTorch.
