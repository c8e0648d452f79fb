"""The formats of `outpace plan --emit`, by name: known without importing what writes them."""

FORMATS = ("deepspeed", "accelerate", "torchtitan", "megatron", "nanotron", "fsdp", "outpace")
