"""Whole models that outpace does not know: transformers' families, and other kinds of networks.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. Sizes are the least that have every part. `MODULES` lists
all entries; of those in `CUT` a batch that is cut trains otherwise by construction, and those in
`DRAWS` draw random numbers, so that nothing can be proved of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.common import Batch, Entry, MakeBatch, squared_error

VOCAB, LENGTH, WIDTH, LAYERS = 24, 6, 8, 2
COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
          "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def token_batch(drawn: torch.Generator, samples: int) -> Batch:
    numbers = torch.randint(3, VOCAB, (samples, LENGTH + 1), generator=drawn)
    return {"tokens": numbers[:, :-1].contiguous(), "targets": numbers[:, 1:].contiguous()}


def _images(size: int) -> MakeBatch:
    def make(drawn: torch.Generator, samples: int) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=drawn)
        return images, torch.randint(4, (samples,), generator=drawn)

    return make


def _vectors(drawn: torch.Generator, samples: int) -> Batch:
    shape = (samples, LENGTH)
    return torch.randn(*shape, WIDTH, generator=drawn), torch.randn(*shape, WIDTH, generator=drawn)


def _next_tokens(module: nn.Module, batch: Batch) -> Tensor:
    """A mean over tokens, of which all samples have as many."""
    made = module(batch["tokens"])
    logits = getattr(made, "logits", made)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _classes(module: nn.Module, batch: Batch) -> Tensor:
    made = module(batch[0])
    return F.cross_entropy(getattr(made, "logits", made), batch[1])


def _causal(name: str, seed: int, **changes: Any) -> Entry:
    """A language model of transformers, by the name of its classes."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, "use_cache": False, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config), _next_tokens, token_batch


def gpt_neox(seed: int) -> Entry:
    """Parallel attention and MLP, rotary on a part of each head."""
    return _causal("GPTNeoX", seed, hidden_dropout=0.1)


def olmo2(seed: int) -> Entry:
    """Norms after the branches, and of queries and keys."""
    return _causal("Olmo2", seed, num_key_value_heads=2)


def phi(seed: int) -> Entry:
    """One norm for both branches; biases everywhere."""
    return _causal("Phi", seed, num_key_value_heads=2)


def gemma2(seed: int) -> Entry:
    """Soft-capped scores, tied embeddings that are scaled, windows in every other layer."""
    return _causal("Gemma2", seed, num_key_value_heads=2, head_dim=4)


def opt(seed: int) -> Entry:
    """Learned positions with an offset, and dropout."""
    return _causal("OPT", seed, ffn_dim=12, word_embed_proj_dim=WIDTH, do_layer_norm_before=True)


def bloom(seed: int) -> Entry:
    """ALiBi, and a norm behind the embedding."""
    return _causal("Bloom", seed, n_layer=LAYERS, n_head=2)


def mixtral(seed: int) -> Entry:
    """Experts, of which a micro-batch leaves some out."""
    return _causal("Mixtral", seed, num_key_value_heads=2, num_local_experts=3,
                   num_experts_per_tok=1)  # fmt: skip


def mamba(seed: int) -> Entry:
    """Selective state spaces: a convolution and a scan."""
    return _causal("Mamba", seed, state_size=4, use_mambapy=False)


def rwkv(seed: int) -> Entry:
    """A linear recurrence with decay."""
    return _causal("Rwkv", seed, attention_hidden_size=WIDTH, context_length=16)


def t5(seed: int) -> Entry:
    """Encoder and decoder, which share an embedding and a table of relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(vocab_size=VOCAB, d_model=WIDTH, d_kv=4, d_ff=12, num_layers=LAYERS,
                      num_heads=2, decoder_start_token_id=0, use_cache=False)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(input_ids=batch["tokens"], labels=batch["targets"]).loss

    return T5ForConditionalGeneration(config), loss, token_batch


def whisper(seed: int) -> Entry:
    """Convolutions over sound, and a decoder that looks at them."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=4, d_model=WIDTH, encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
        decoder_ffn_dim=12, max_source_positions=6, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {
            "sound": torch.randn(samples, 4, 12, generator=drawn),
            **token_batch(drawn, samples),
        }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(input_features=batch["sound"], labels=batch["targets"]).loss

    return WhisperForConditionalGeneration(config), loss, make


def bert_with_unused_pooler(seed: int) -> Entry:
    """An encoder whose pooler nothing uses, and a head beside it."""
    from transformers import BertConfig, BertModel

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = BertModel(BertConfig(**COMMON))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.encoder(tokens).last_hidden_state)

    torch.manual_seed(seed)
    return Tagger(), _next_tokens, token_batch


def vit(seed: int) -> Entry:
    """Patches of images, a class token, and learned positions."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
                       intermediate_size=12, image_size=8, patch_size=4, num_labels=4)  # fmt: skip
    return ViTForImageClassification(config), _classes, _images(8)


def convnext(seed: int) -> Entry:
    """Depthwise convolutions in stages, with layer scales."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(seed)
    config = ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 2], num_stages=2, patch_size=2,
                            image_size=16, num_labels=4)  # fmt: skip
    return ConvNextForImageClassification(config), _classes, _images(16)


def resnet(seed: int) -> Entry:
    """Batch normalisation: its statistics are those of the samples that go through at once."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=4,
                          layer_type="basic")  # fmt: skip
    return ResNetForImageClassification(config), _classes, _images(16)


def clip(seed: int) -> Entry:
    """Two towers and a scalar temperature: the other samples are the negatives."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    tower = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": LAYERS,
             "num_attention_heads": 2}  # fmt: skip
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 16,
                     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=WIDTH,
    )  # fmt: skip

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {"images": _images(8)(drawn, samples)[0], **token_batch(drawn, samples)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(input_ids=batch["tokens"], pixel_values=batch["images"],
                      return_loss=True).loss  # fmt: skip

    return CLIPModel(config), loss, make


def recurrent_language_model(seed: int) -> Entry:
    """LSTM layers with dropout between, and a tied head."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layers(self.embed(tokens))[0])

    torch.manual_seed(seed)
    return Model(), _next_tokens, token_batch


def seq2seq_with_attention(seed: int) -> Entry:
    """A loop over cells: each is called once for each token."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Embedding(VOCAB, WIDTH), nn.GRU(WIDTH, WIDTH)
            self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor) -> Tensor:
            seen, state = self.encoder(self.embed(tokens).transpose(0, 1))
            state, out = state[0], []
            for embedded in self.embed(tokens).unbind(1):
                weights = torch.einsum("sbd,bd->bs", seen, state).softmax(-1)
                context = torch.einsum("bs,sbd->bd", weights, seen)
                state = self.cell(torch.cat([embedded, context], -1), state)
                out.append(self.head(state))
            return torch.stack(out, 1)

    torch.manual_seed(seed)
    return Model(), _next_tokens, token_batch


class _DownUp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(4, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + F.silu(self.conv(self.norm(x)) + self.time(time)[:, :, None, None])


def unet(seed: int) -> Entry:
    """Skips from the way down to the way up, and the step of a diffusion in every block."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.down = nn.ModuleList([_DownUp(4), _DownUp(4)])
            self.middle = _DownUp(4)
            self.merge = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)])
            self.up = nn.ModuleList([_DownUp(4), _DownUp(4)])
            self.head = nn.Conv2d(4, 3, 1)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            x, skips = self.stem(x), []
            for block in self.down:
                x = block(x, time)
                skips.append(x)
                x = F.avg_pool2d(x, 2)
            x = self.middle(x, time)
            for block, merge in zip(self.up, self.merge, strict=True):
                x = F.interpolate(x, scale_factor=2.0)
                x = block(merge(torch.cat([x, skips.pop()], 1)), time)
            return self.head(x)

    def make(drawn: torch.Generator, samples: int) -> Batch:
        clean, noise = torch.randn(2, samples, 3, 8, 8, generator=drawn).unbind()
        return clean, noise, torch.rand(samples, 4, generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        clean, noise, time = batch
        return (module(clean + noise, time) - noise).square().mean()

    torch.manual_seed(seed)
    return Model(), loss, make


def x_transformer(seed: int) -> Entry:
    """Layers as lists of norm, function and residual, in one ModuleList."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return x + residual * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            kinds = [Attention, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())] * LAYERS
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(WIDTH), kind(), Residual()]) for kind in kinds
            )
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for norm, function, residual in self.layers:
                x = residual(function(norm(x)), x)
            return self.head(x)

    torch.manual_seed(seed)
    return Model(), _next_tokens, token_batch


def perceiver(seed: int) -> Entry:
    """Learned latents, and one block that is called several times."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(3, WIDTH))
            self.look = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            latents = self.latents.expand(len(x), -1, -1)
            for _ in range(3):
                latents = self.block(latents + self.look(latents, x, x)[0])
            return self.head(latents).mean(1, keepdim=True).expand_as(x)

    torch.manual_seed(seed)
    return Model(), squared_error, _vectors


def state_space(seed: int) -> Entry:
    """A diagonal linear recurrence with complex parameters, by a convolution."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.rand(WIDTH))
            self.inner = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
            kernel = (torch.exp(-self.decay.exp() * steps) * self.inner).real
            rows = [(x[:, : t + 1] * kernel[: t + 1].flip(0)).sum(1) for t in range(x.shape[1])]
            return x + self.out(torch.stack(rows, 1))

    torch.manual_seed(seed)
    return nn.Sequential(Layer(), Layer()), squared_error, _vectors


def mixer(seed: int) -> Entry:
    """Mixes tokens, and then channels, by transposing within a block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.channels = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + torch.tanh(self.tokens(x.transpose(1, 2))).transpose(1, 2)
            return x + torch.tanh(self.channels(x))

    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(4))), squared_error, _vectors


def recommender(seed: int) -> Entry:
    """Bags of features beside numbers, and their products."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(VOCAB, WIDTH) for _ in range(2))
            self.numbers = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))

        def forward(self, numbers: Tensor, features: Tensor) -> Tensor:
            parts = [self.numbers(numbers), *(bag(features) for bag in self.bags)]
            products = [(a * b).sum(-1) for a, b in zip(parts, parts[1:] + parts[:1], strict=True)]
            return self.head(torch.stack(products, -1))[:, 0]

    def make(drawn: torch.Generator, samples: int) -> Batch:
        numbers = torch.randn(samples, WIDTH, generator=drawn)
        features = torch.randint(VOCAB, (samples, 3), generator=drawn)
        return numbers, features, torch.randint(2, (samples,), generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0], batch[1])
        return F.binary_cross_entropy_with_logits(made, batch[2].to(made.dtype))

    torch.manual_seed(seed)
    return Model(), loss, make


def two_tasks(seed: int) -> Entry:
    """An encoder with two heads, and a learned weight of no dimension for each task's loss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
            )
            self.classes, self.values = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
            self.weights = nn.ParameterList([nn.Parameter(torch.tensor(0.1)) for _ in range(2)])

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            hidden = torch.tanh(self.encoder(x))
            first = F.cross_entropy(self.classes(hidden.mean(1)), targets[:, 0, :4].argmax(-1))
            second = (self.values(hidden) - targets).square().mean()
            both = zip((first, second), self.weights, strict=True)
            return sum(loss * torch.exp(-weight) + weight for loss, weight in both)

    torch.manual_seed(seed)
    return Model(), lambda module, batch: module(*batch), _vectors


def frozen_encoder_with_adapter(seed: int) -> Entry:
    """A frozen image encoder, whose patches a language model reads before its tokens."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Conv2d(3, WIDTH, 4, stride=4).requires_grad_(False)
            self.adapter, self.embed = nn.Linear(WIDTH, WIDTH), nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True) for _ in range(LAYERS)
            )
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                patches = self.vision(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.adapter(patches), self.embed(tokens)], 1)
            for layer in self.layers:
                x = layer(x)
            return self.head(x[:, patches.shape[1] :])

    def make(drawn: torch.Generator, samples: int) -> Batch:
        return {"images": _images(8)(drawn, samples)[0], **token_batch(drawn, samples)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch["images"], batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    torch.manual_seed(seed)
    return Model(), loss, make


def variational_autoencoder(seed: int) -> Entry:
    """Draws noise in its forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            mean, spread = self.encode(x).chunk(2, -1)
            return self.decode(mean + spread.exp() * torch.randn_like(spread))

    torch.manual_seed(seed)
    return Model(), squared_error, _vectors


MODULES: tuple[Callable[[int], Entry], ...] = (
    gpt_neox, olmo2, phi, gemma2, opt, bloom, mixtral, mamba, rwkv, t5, whisper,
    bert_with_unused_pooler, vit, convnext, resnet, clip, recurrent_language_model,
    seq2seq_with_attention, unet, x_transformer, perceiver, state_space, mixer, recommender,
    two_tasks, frozen_encoder_with_adapter, variational_autoencoder,
)  # fmt: skip
CUT = (resnet, clip)
DRAWS = (variational_autoencoder,)
