"""Outlines of published models that outpace can plan for but not train.

They match what transformers builds from the source's config.json, layer by layer.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Outline, Stack

_HF = "config.json of {} on Hugging Face"


def _heads(heads: int, kv_heads: int, head_dim: int, **more: Any) -> AttentionShape:
    return AttentionShape(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, **more
    )


def _no_family(family: str) -> str:
    return f"outpace has no {family}"


def _gpt_like(
    name: str, family: str, source: str, layers: int, hidden: int, heads: int, vocab: int,
    positions: int, *, width: int | None = None, head_dim: int | None = None, bias: bool = True,
    outside: int = 0, tied: bool = True, learned: int = 0, dropout: bool = False, **stack: Any,
) -> Outline:  # fmt: skip
    """Create the outline of a GPT-like model: layer norms, and an MLP with two weight matrices.

    `outside`: the number of parameters outside the layers, not counting the final norm.
    """
    attention = _heads(heads, heads, head_dim or hidden // heads, qkv_bias=bias, out_bias=bias)
    block = Stack(
        layers=layers,
        attention=attention,
        mlp=Mlp(width=width or 4 * hidden, bias=bias),
        norm_bias=bias,
        dropout=dropout,
        **stack,
    )
    return Outline(
        name=name, hidden=hidden, stacks=(block,), vocab=vocab, outputs=vocab, tied=tied,
        learned_positions=learned, outside_parameters=(2 if bias else 1) * hidden + outside,
        max_positions=positions, source=source, untrained=_no_family(family),
    )  # fmt: skip


def _rms(
    name: str, family: str, source: str, stacks: tuple[Stack, ...], hidden: int, vocab: int,
    positions: int, *, tied: bool = False,
) -> Outline:  # fmt: skip
    """Create the outline of a model with an RMS norm after its layers."""
    return Outline(
        name=name, hidden=hidden, stacks=stacks, vocab=vocab, outputs=vocab, tied=tied,
        outside_parameters=hidden, max_positions=positions, source=source,
        untrained=_no_family(family),
    )  # fmt: skip


def _gpts() -> Iterator[Outline]:
    yield _gpt_like(
        "bloom-176b", "BLOOM", f"{_HF.format('bigscience/bloom')}; arXiv 2211.05100, table 3",
        70, 14336, 112, 250880, 2048, outside=2 * 14336,
    )  # fmt: skip
    yield _gpt_like(
        "gpt-neox-20b", "GPT-NeoX",
        f"{_HF.format('EleutherAI/gpt-neox-20b')}; arXiv 2204.06745, §3",
        44, 6144, 64, 50432, 2048, tied=False, parallel=True,
    )  # fmt: skip
    yield _gpt_like(
        "opt-175b", "OPT", "Zhang et al., arXiv 2205.01068, table 1; vocabulary, dropout and "
                           "whatever else the smaller models share: "
                           f"{_HF.format('facebook/opt-66b')}",
        96, 12288, 96, 50272, 2048, learned=2050, dropout=True,
    )  # fmt: skip
    yield _gpt_like(
        "phi-2", "Phi", _HF.format("microsoft/phi-2"),
        32, 2560, 32, 51200, 2048, tied=False, outside=51200, parallel=True, norms=1, dropout=True,
    )  # fmt: skip
    foundry = (
        "scripts/train/yamls/pretrain/mpt-70b.yaml of github.com/mosaicml/llm-foundry, with the "
        "positions of the smaller models and, like them, no biases"
    )
    for size, source, layers, hidden, heads, vocab, positions in (
        ("7b", _HF.format("mosaicml/mpt-7b"), 32, 4096, 32, 50432, 2048),
        ("30b", _HF.format("mosaicml/mpt-30b"), 48, 7168, 64, 50432, 8192),
        ("70b", foundry, 80, 8192, 64, 50368, 2048),
    ):
        yield _gpt_like(
            f"mpt-{size}", "MPT", source, layers, hidden, heads, vocab, positions, bias=False
        )


def _experts(width: int, experts: int, active: int, shared: int = 0) -> Mlp:
    return Mlp(width=width, gated=True, experts=experts, active=active, shared=shared)


def _mixtures() -> Iterator[Outline]:
    for size, layers, hidden, heads, width, positions in (
        ("8x7b", 32, 4096, 32, 14336, 32768),
        ("8x22b", 56, 6144, 48, 16384, 65536),
    ):
        stack = Stack(
            name="layers of experts", layers=layers, attention=_heads(heads, 8, 128),
            mlp=_experts(width, 8, 2),
        )  # fmt: skip
        source = _HF.format(f"mistralai/Mixtral-{size.replace('b', 'B')}-v0.1")
        yield _rms(f"mixtral-{size}", "Mixtral", source, (stack,), hidden, 32000, positions)
    for size, published, layers, hidden, heads, width in (
        ("30b-a3b", "30B-A3B", 48, 2048, 32, 768),
        ("235b-a22b", "235B-A22B", 94, 4096, 64, 1536),
    ):
        stack = Stack(
            name="layers of experts", layers=layers, attention=_heads(heads, 4, 128, qk_norm=True),
            mlp=_experts(width, 128, 8),
        )  # fmt: skip
        source = _HF.format(f"Qwen/Qwen3-{published}")
        yield _rms(f"qwen3-{size}", "Qwen3-MoE", source, (stack,), hidden, 151936, 40960)


def _latent() -> Iterator[Outline]:
    """Yield the outlines of DeepSeek-V2, and of V3 without its multi-token prediction layers."""
    attention = AttentionShape(
        heads=128, kv_heads=128, head_dim=192, value_dim=128,
        query_rank=1536, kv_rank=512, rope_dim=64,
    )  # fmt: skip
    for version, first, rest, hidden, dense, experts, vocab, paper in (
        ("2", 1, 59, 5120, 12288, _experts(1536, 160, 6, 2 * 1536), 102400, "2405.04434, §3.1.2"),
        ("3", 3, 58, 7168, 18432, _experts(2048, 256, 8, 2048), 129280, "2412.19437, §4.2"),
    ):
        stacks = (
            Stack(layers=first, attention=attention, mlp=Mlp(width=dense, gated=True)),
            Stack(name="layers of experts", layers=rest, attention=attention, mlp=experts),
        )
        source = f"{_HF.format(f'deepseek-ai/DeepSeek-V{version}')}; arXiv {paper}"
        yield _rms(
            f"deepseek-v{version}", f"DeepSeek-V{version}", source, stacks, hidden, vocab, 163840
        )


def _gemmas() -> Iterator[Outline]:
    for size, layers, hidden, heads, kv_heads, head_dim, width in (
        ("9b", 42, 3584, 16, 8, 256, 14336),
        ("27b", 46, 4608, 32, 16, 128, 36864),
    ):
        attention = _heads(heads, kv_heads, head_dim)
        common: dict[str, Any] = {
            "layers": layers // 2, "mlp": Mlp(width=width, gated=True), "norms": 4,
            "norm_last": True,
        }  # fmt: skip
        stacks = (
            Stack(
                name="layers with a window",
                attention=attention.model_copy(update={"window": 4096}),
                **common,
            ),
            Stack(attention=attention, **common),
        )
        yield _rms(
            f"gemma-2-{size}", "Gemma 2", _HF.format(f"google/gemma-2-{size}"), stacks, hidden,
            256000, 8192, tied=True,
        )  # fmt: skip


def _phi3() -> Outline:
    stack = Stack(
        name="layers with a window", layers=32, attention=_heads(32, 32, 96, window=2047),
        mlp=Mlp(width=8192, gated=True),
    )  # fmt: skip
    source = _HF.format("microsoft/Phi-3-mini-4k-instruct")
    return _rms("phi-3-mini", "Phi-3", source, (stack,), 3072, 32064, 4096)


def _t5() -> Outline:
    """Create T5's outline, with two norms and twice 32 position biases per head outside layers."""
    hidden, heads = 1024, 128
    attention = _heads(heads, heads, 128, causal=False)
    mlp = Mlp(width=65536)
    encoder = Stack(name="encoder", layers=24, attention=attention, mlp=mlp, dropout=True)
    decoder = Stack(
        name="decoder", layers=24, attention=attention.model_copy(update={"causal": True}),
        cross_attention=attention, mlp=mlp, norms=3, dropout=True,
    )  # fmt: skip
    return Outline(
        name="t5-11b", hidden=hidden, stacks=(encoder, decoder), vocab=32128, outputs=32128,
        tied=True, outside_parameters=2 * (hidden + 32 * heads), max_positions=512,
        source=f"{_HF.format('google-t5/t5-11b')}; arXiv 1910.10683, §3.7",
        untrained=_no_family("T5"),
    )  # fmt: skip


def _vits() -> Iterator[Outline]:
    """Create ViT's outline: patches of 16 × 16 pixels of a 224 × 224 image, and a class token."""
    patches, classes = 14 * 14, 1000
    for size, published, layers, hidden, heads in (
        ("b", "base", 12, 768, 12),
        ("l", "large", 24, 1024, 16),
    ):
        stack = Stack(
            layers=layers,
            attention=_heads(
                heads, heads, hidden // heads, causal=False, qkv_bias=True, out_bias=True
            ),
            mlp=Mlp(width=4 * hidden, bias=True),
            norm_bias=True,
            seq_len=patches + 1,
        )
        cut = MatmulShape(name="patches", inputs=3 * 16 * 16, outputs=hidden, positions=patches)
        yield Outline(
            name=f"vit-{size}-16", hidden=hidden, stacks=(stack,), vocab=0, outputs=classes,
            learned_positions=patches + 1, embed_matmuls=(cut,), predicted=1,
            # The bias for patches, the class token, the final norm, and the classifier's bias.
            outside_parameters=4 * hidden + classes, max_positions=patches + 1,
            source=_HF.format(f"google/vit-{published}-patch16-224"), untrained=_no_family("ViT"),
        )  # fmt: skip


OUTLINES: Mapping[str, Outline] = MappingProxyType(
    {
        one.name: one
        for one in (*_gpts(), *_mixtures(), *_latent(), *_gemmas(), _phi3(), _t5(), *_vits())
    }
)
