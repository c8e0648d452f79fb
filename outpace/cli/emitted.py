"""The formats of `outpace plan --emit`, by name, without importing the modules that write them."""

FORMATS = ("deepspeed", "accelerate", "torchtitan", "megatron", "nanotron", "fsdp", "outpace")
# Software that a plan may be for, besides what can be written.
TRAINERS = (
    "outpace", "torchtitan", "megatron", "deepspeed", "accelerate", "nanotron", "trainer", "trl",
)  # fmt: skip
# Whose 16 bits are autocast's, with weights in fp32, unless a script says otherwise.
AUTOCAST = ("accelerate", "fsdp")
