"""The formats of `outpace plan --emit`, by name: known without importing what writes them."""

FORMATS = ("deepspeed", "accelerate", "torchtitan", "megatron", "nanotron", "fsdp", "outpace")
# Whose 16 bits are autocast's, with weights in fp32, unless a script says otherwise.
AUTOCAST = ("accelerate", "fsdp")
