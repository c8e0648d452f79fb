"""Names of export formats and trainers, which `outpace plan --help` shows without slow imports."""

FORMATS = ("deepspeed", "accelerate", "torchtitan", "megatron", "nanotron", "fsdp", "outpace")
# Trainers whose time and memory can be predicted. Not all of them have an export format.
TRAINERS = (
    "outpace", "torchtitan", "megatron", "deepspeed", "accelerate", "nanotron", "trainer", "trl",
)  # fmt: skip
# Formats of programs that by default compute in 16 bits by autocast of fp32 weights.
AUTOCAST = ("accelerate", "fsdp")
