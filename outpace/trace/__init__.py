"""The real model and plan under fake tensors: memory of any rank of any world size."""
