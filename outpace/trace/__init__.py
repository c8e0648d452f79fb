"""The real model and the real plan under fake tensors: the memory of any rank of any world."""
