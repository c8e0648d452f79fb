"""The formats of `outpace plan --emit`, by name, without importing the modules that write them."""

FORMATS = ("deepspeed", "accelerate", "torchtitan", "megatron", "nanotron", "fsdp", "outpace")
# Trainers for which to plan, in addition to those to which a plan can be exported.
TRAINERS = (
    "outpace", "torchtitan", "megatron", "deepspeed", "accelerate", "nanotron", "trainer", "trl",
)  # fmt: skip
# Programs that use 16 bits through autocast with fp32 weights, unless a script says otherwise.
AUTOCAST = ("accelerate", "fsdp")
