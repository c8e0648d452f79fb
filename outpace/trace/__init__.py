"""The real model and the real plan under fake tensors: memory of any rank of any world size."""
