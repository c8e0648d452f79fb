"""Fractions of link rates that collectives reach, and NCCL's latencies, as published.

Each figure has its source. Links and chips without published measurements use the figures of the
most similar measured ones, as their sources state.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import NonNegativeFloat, PositiveFloat

from outpace.records.base import Record
from outpace.records.hardware import Accelerator, Architecture, LinkKind

# Share of a link's one-way rate reached by NCCL's large ring all-reduces.
LINK_SHARE: Mapping[LinkKind, float] = MappingProxyType(
    {
        "nvlink": 235 / 300,
        "infinity-fabric": 316 / 448,
        "pcie": 0.8,
        "infiniband": 191 / 200,
        "omni-path": 0.95,
        "ethernet": 0.93,
        "efa": 0.95,
        "slingshot": 0.95,
        "memory": 1.0,
    }
)
LINK_SOURCE = (
    "busbw of large all-reduces: 8 × A100 235 of 300 GB/s (microsoft/superbenchmark, test of "
    "nccl_bw_performance), 8 × MI300X 316 of 448, 4 × DGX A100 with 8 × HDR 191 of 200 "
    "(NVIDIA/deepops, Slurm cluster guide); RoCE 188 of 200 (2 × 8 A100, oracle-quickstart/"
    "oci-hpc-oke 61d210a) and 371 of 400 (4 × 8 MI355X); EFA 382 of 400 (4 × p6-b200.48xlarge); "
    "other networks as the nearest of these"
)
# Rates over direct links relative to that all-reduce: all-gathers and reduce-scatters of 8 devices,
# and all collectives of fewer devices, whose rings have fewer channels.
GATHER_SHARE, SCATTER_SHARE = 335 / 450 / (235 / 300), 336 / 450 / (235 / 300)
GROUP_SHARE: Mapping[int, float] = MappingProxyType({2: 0.75, 3: 0.85, 4: 0.93})
GROUP_SOURCE = (
    "busbw of large collectives within a node (aiconfigurator 095f58a5, nccl): all-gather and "
    "reduce-scatter of 8 × H100 335 and 336 of 450 GB/s, of 8 × A100 205 and 213 of 300; of 4 "
    "devices 0.92 to 0.95 of that, of 2 0.73 to 0.78 (H100, A100, B200)"
)
# Share of an accelerator's multiprocessors that overlapping collectives use: a channel of NCCL is a
# block of threads that occupies a multiprocessor.
COLLECTIVE_MULTIPROCESSORS = 20
COLLECTIVE_SOURCE = (
    "16 to 24 blocks: Transformer Engine's overlap of tensor parallelism has 16 (userbuffers, "
    "num_sm), NCCL's rings on DGX A100 24 channels; DeepEP's all-to-alls are fastest with 20 to 24"
)
# Factor by which a concurrent collective slows down matmuls, on chips where cuBLAS starts one block
# of threads per multiprocessor, which computes several tiles: blocks for which a collective leaves
# no multiprocessor run after all others. Blackwell schedules tiles as multiprocessors become free.
PERSISTENT_MATMULS: Mapping[Architecture, float] = MappingProxyType({"hopper": 2.0})
PERSISTENT_SOURCE = (
    "H100, FSDP: cuBLAS's matmuls take twice as long beside NCCL's kernels, which occupy a tenth "
    "of the multiprocessors (pytorch/pytorch issue 143988, pull request 144974); Blackwell: "
    "NVIDIA/cutlass, media/docs/cpp/blackwell_cluster_launch_control.md"
)
# Share of a link's one-way rate reached by large all-to-alls; across nodes, of a card's rate.
ALL_TO_ALL_SHARE = 0.70
ALL_TO_ALL_NETWORK_SHARE = 0.80
ALL_TO_ALL_SOURCE = (
    "NCCL's all-to-all inside a node, of 300, 450 and 900 GB/s: A100 203 to 210, H100 315 to 320, "
    "B200 563 to 640, GB200 in a rack 640 (ai-dynamo/aiconfigurator 095f58a5, fp16, 512 MiB; "
    "NVIDIA GTC 2024 s62129); across nodes, what a card carries: A100 18.6 of 25 and H100 37 of 50 "
    "on four nodes (the same slides), MI355X 46 and 39 of 50 on two and four (Oracle's guide), "
    "DeepEP on H100 43 of 50 on four (aiconfigurator, 4,096 tokens and more)"
)
# DeepEP's rates over a network include copies that stay on a node. Copies that leave the node are
# sent at 43.1 of 50 GB/s on four nodes and 44.2 on eight (deepseek-ai/DeepEP 0297fc80, legacy.md:
# 57.5 and 50.5 for all copies, of which 3/4 and 7/8 leave; V2 45.8 on four), and at 43.5 on four
# nodes of H100 (aiconfigurator 095f58a5, combining). Two nodes take longer: 21.5 on H800, 32 on
# H100.
_DISPATCH_CARD_SHARE = 0.87


class DispatchRate(Record):
    """Cost model of a dispatcher that sends each token once per rank (DeepEP, HybridEP).

    Dispatching or combining the tokens of a rank takes `fixed_s`, plus `token_s` per token, plus
    the time to send their bytes at `link_share` of a device's link rate or `card_share` of a
    network card's rate. The figures are averages of dispatching and combining, because a step does
    both equally often.
    """

    fixed_s: NonNegativeFloat
    token_s: NonNegativeFloat
    link_share: PositiveFloat
    card_share: PositiveFloat = _DISPATCH_CARD_SHARE
    source: str


_DISPATCH = (
    "DeepEP on 8 × {}, bf16, 1,024 to 32,768 tokens of 2,048 to 7,168 numbers (ai-dynamo/"
    "aiconfigurator 095f58a5, sglang 0.5.12), fitted to half of the shapes, mean error on the "
    "other half {}"
)
# On H100, only times of combining are used. Times of dispatching are labelled bf16, too, but are
# 0.52 of combining's on 1, 4 and 8 nodes, as for 8 bits with scales. Per byte, both are equally
# fast (DeepEP's own tables).
_DISPATCH_HOPPER = DispatchRate(
    fixed_s=35.3e-6, token_s=28.3e-9, link_share=0.84,
    source=_DISPATCH.format("H100", "8.4 %") + "; combining, which surely sends 16 bits",
)  # fmt: skip
_DISPATCH_B200 = DispatchRate(
    fixed_s=51.8e-6, token_s=32.1e-9, link_share=0.73, source=_DISPATCH.format("B200", "4.6 %")
)
# In a rack the dispatcher is HybridEP, published for one width: 8, 16, 24, 32 and 36 × GB200 take
# 553 to 920 us for 4,096 tokens of 7,168 numbers. With DeepEP's fixed time and time per token, the
# bytes are then sent at 0.84 to 0.63 of the link's rate.
_DISPATCH_RACK = DispatchRate(
    fixed_s=38.3e-6, token_s=38.2e-9, link_share=0.71,
    source=_DISPATCH.format("GB200 and GB300", "6.0 %") + "; share of the link: HybridEP on 8 to "
    "36 × GB200 with 32 multiprocessors (deepseek-ai/DeepEP 94a9f8f, README_Hybrid-EP.md)",
)  # fmt: skip
# Share of the rate of a bridge between two cards reached by a ring of both. All-reduce of 64 to 128
# MB on two RTX 2080 Ti with an NVLink bridge (TU102, two links): busbw 21.5 of 50 GB/s
# (NVIDIA/nccl-tests issue 44).
BRIDGE_SHARE = 21.5 / 50
# Share of a slot's rate between devices without direct links: every byte goes to the host and back
# through one bridge. 0.8 of a slot's rate, halved: what is sent is also received there.
HOST_BRIDGE_SHARE = 0.4


class Latency(Record):
    """Latency and bandwidth of an algorithm for collectives.

    The latency is `base_s`, plus `nvlink_s`, `pcie_s` or `network_s` for each step over such a
    link. `bandwidth` is the fraction of the links' bandwidth that the algorithm reaches. For trees,
    `by_size` has a factor on this fraction for each message size, in powers of two from 64 bytes.
    """

    base_s: NonNegativeFloat
    nvlink_s: NonNegativeFloat
    pcie_s: NonNegativeFloat
    network_s: NonNegativeFloat
    bandwidth: PositiveFloat
    by_size: tuple[PositiveFloat, ...] = ()


# NCCL's rings by protocol. A step of "Simple" takes 1.9 times as long for large arrays.
_COLUMNS = ("base_s", "nvlink_s", "pcie_s", "network_s", "bandwidth")
_RINGS = {
    "LL": (6.6e-6, 0.6e-6, 1e-6, 2.7e-6, 1 / 4),
    "LL128": (14e-6, 1.9e-6, 2.5e-6, 4e-6, 0.92),
    "Simple": (8.4e-6, 1.9 * 3.4e-6, 1.9 * 5.7e-6, 14e-6, 1.0),
}
NCCL: Mapping[str, Latency] = MappingProxyType(
    {
        name: Latency.parse(dict(zip(_COLUMNS, row, strict=True)), name)
        for name, row in _RINGS.items()
    }
)
# NCCL's double binary trees, for all-reduces over several nodes: 0.92 of a ring's bus bandwidth,
# 1/3.8 of that with LL and 120/128 with LL128; "by_size" is NCCL's own correction, up to 256 MiB.
# Steps within a node form a chain. Limits of channels are ignored, as are NCCL's other algorithms,
# which sum in switches (NVLS, CollNet).
_TREES = {
    "LL": (6.8e-6, 0.6e-6, 1e-6, 5e-6, 0.92 / 3.8),
    "LL128": (14e-6, 1.25e-6, 1.9e-6, 8.5e-6, 0.92 * 120 / 128),
    "Simple": (0.0, 28e-6, 28e-6, 28e-6, 0.92),
}
_BY_SIZE = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9,
           1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9,
              0.9, 0.9, 1, 1),
    "Simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7,
               0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip
NCCL_TREES: Mapping[str, Latency] = MappingProxyType(
    {
        name: Latency.parse(
            {**dict(zip(_COLUMNS, row, strict=True)), "by_size": (*_BY_SIZE[name], 1.0)}, name
        )
        for name, row in _TREES.items()
    }
)
NCCL_SOURCE = (
    "NVIDIA/nccl b6475625fb, src/graph/tuning.cc: latencies and protocols, rings and trees"
)


def dispatch_rate(accelerator: Accelerator) -> DispatchRate:
    """Return the dispatch rate of the accelerator, or of the most similar measured one."""
    if accelerator.name.startswith(("GB200", "GB300")):
        return _DISPATCH_RACK
    return _DISPATCH_B200 if accelerator.architecture == "blackwell" else _DISPATCH_HOPPER
