"""Real modules of other libraries, shrunken: x-transformers, timm, torchvision, diffusers and more.

Nothing of the suite needs them; `benchmarks/zoo.py` records those that are there. An entry
`name(seed)` gives a module, its loss (None: the module's own), and a function that makes a batch of
so many samples with a generator. `LIBRARIES` says which packages each entry needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.common import Batch, Entry, MakeBatch
from zoo.whole import LENGTH, VOCAB, token_batch

WIDTH, CLASSES = 16, 4


def _images(size: int) -> MakeBatch:
    def make(drawn: torch.Generator, samples: int) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=drawn)
        return images, torch.randint(CLASSES, (samples,), generator=drawn)

    return make


def _masks(size: int) -> MakeBatch:
    def make(drawn: torch.Generator, samples: int) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=drawn)
        return images, torch.randint(CLASSES, (samples, size, size), generator=drawn)

    return make


def _noised(size: int) -> MakeBatch:
    def make(drawn: torch.Generator, samples: int) -> Batch:
        images, noise = torch.randn(2, samples, 3, size, size, generator=drawn).unbind()
        steps = torch.randint(10, (samples,), generator=drawn)
        words = torch.randn(samples, 3, 8, generator=drawn)
        return {"images": images, "noise": noise, "steps": steps, "words": words}

    return make


def _next_tokens(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _classes(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def x_transformers_decoder(seed: int) -> Entry:
    """Rotary positions, grouped keys, gated functions, RMSNorm, and queries and keys normalised."""
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(seed)
    layers = Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True,
                     attn_kv_heads=1, ff_glu=True, use_rmsnorm=True, attn_qk_norm=True)  # fmt: skip
    module = TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers)
    return module, _next_tokens, token_batch


def x_transformers_with_memory(seed: int) -> Entry:
    """ALiBi, memory tokens, layers that come twice, and residual attention; its own loss."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(seed)
    layers = Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=8, alibi_pos_bias=True,
                     residual_attn=True)  # fmt: skip
    inner = TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, num_memory_tokens=2,
                               attn_layers=layers, tie_embedding=True)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"])

    return AutoregressiveWrapper(inner), loss, token_batch


def x_transformers_translation(seed: int) -> Entry:
    """Encoder and decoder with attention across."""
    from x_transformers import XTransformer

    torch.manual_seed(seed)
    module = XTransformer(dim=WIDTH, enc_num_tokens=VOCAB, enc_depth=1, enc_heads=2,
                          enc_max_seq_len=16, dec_num_tokens=VOCAB, dec_depth=2, dec_heads=2,
                          dec_max_seq_len=16, enc_attn_dim_head=8, dec_attn_dim_head=8,
                          tie_token_emb=True)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"], batch["targets"])

    return module, loss, token_batch


def x_transformers_images(seed: int) -> Entry:
    """A transformer over patches."""
    from x_transformers import Encoder, ViTransformerWrapper

    torch.manual_seed(seed)
    layers = Encoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=8)
    module = ViTransformerWrapper(image_size=8, patch_size=4, num_classes=CLASSES,
                                  attn_layers=layers)  # fmt: skip
    return module, _classes, _images(8)


def timm_vit(seed: int) -> Entry:
    """timm's VisionTransformer, with stochastic depth of rate 0 and layer scales."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    module = VisionTransformer(img_size=8, patch_size=4, embed_dim=WIDTH, depth=4, num_heads=2,
                               num_classes=CLASSES, init_values=0.1)  # fmt: skip
    return module, _classes, _images(8)


def timm_swin(seed: int) -> Entry:
    """Windows that are shifted, in stages that merge patches."""
    from timm.models.swin_transformer import SwinTransformer

    torch.manual_seed(seed)
    module = SwinTransformer(img_size=16, patch_size=2, embed_dim=8, depths=(2, 2),
                             num_heads=(2, 2), window_size=4, num_classes=CLASSES,
                             drop_path_rate=0.0)  # fmt: skip
    return module, _classes, _images(16)


def timm_convnext(seed: int) -> Entry:
    """Depthwise convolutions and global response normalisation."""
    from timm.models.convnext import ConvNeXt

    torch.manual_seed(seed)
    module = ConvNeXt(depths=(1, 1, 2, 1), dims=(4, 4, 8, 8), num_classes=CLASSES, use_grn=True)
    return module, _classes, _images(32)


def timm_mixer(seed: int) -> Entry:
    """MLPs over patches and channels."""
    from timm.models.mlp_mixer import MlpMixer

    torch.manual_seed(seed)
    module = MlpMixer(img_size=8, patch_size=4, embed_dim=WIDTH, num_blocks=4,
                      num_classes=CLASSES)  # fmt: skip
    return module, _classes, _images(8)


def timm_efficientnet(seed: int) -> Entry:
    """Inverted bottlenecks with BatchNorm and squeeze-and-excitation."""
    import timm

    torch.manual_seed(seed)
    module = timm.create_model("test_efficientnet", num_classes=CLASSES, pretrained=False)
    return module, _classes, _images(16)


def torchvision_resnet(seed: int) -> Entry:
    """BatchNorm, and stages as nn.Sequential."""
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(seed)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES), _classes, _images(32)


def torchvision_resnet_group_norm(seed: int) -> Entry:
    """The same with GroupNorm, of which a cut changes nothing."""
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(seed)
    module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES,
                    norm_layer=lambda channels: nn.GroupNorm(4, channels))  # fmt: skip
    return module, _classes, _images(32)


def torchvision_vit(seed: int) -> Entry:
    """Its VisionTransformer, with an OrderedDict of layers in nn.Sequential."""
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    module = VisionTransformer(image_size=8, patch_size=4, num_layers=4, num_heads=2,
                               hidden_dim=WIDTH, mlp_dim=16, num_classes=CLASSES)  # fmt: skip
    nn.init.normal_(module.heads.head.weight, std=0.1)
    return module, _classes, _images(8)


def torchvision_swin(seed: int) -> Entry:
    """Its SwinTransformer: channels last between stages."""
    from torchvision.models.swin_transformer import SwinTransformer

    torch.manual_seed(seed)
    module = SwinTransformer(patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[2, 2],
                             window_size=[4, 4], stochastic_depth_prob=0.0,
                             num_classes=CLASSES)  # fmt: skip
    return module, _classes, _images(16)


def diffusers_unet(seed: int) -> Entry:
    """A UNet with skips and steps."""
    from diffusers import UNet2DModel

    torch.manual_seed(seed)
    module = UNet2DModel(sample_size=8, block_out_channels=(8, 16), layers_per_block=1,
                         norm_num_groups=4, attention_head_dim=4,
                         down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                         up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["images"] + batch["noise"], batch["steps"]).sample
        return (made - batch["noise"]).square().mean()

    return module, loss, _noised(8)


def diffusers_unet_with_words(seed: int) -> Entry:
    """Stable Diffusion's UNet, with attention to words."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    module = UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch["images"] + batch["noise"], batch["steps"], batch["words"]).sample
        return (made - batch["noise"]).square().mean()

    return module, loss, _noised(8)


def diffusers_dit(seed: int) -> Entry:
    """A diffusion transformer: blocks whose norms steps and classes modulate."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(seed)
    module = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3,
                                   out_channels=3, num_layers=4, sample_size=8, patch_size=2,
                                   num_embeds_ada_norm=10, norm_num_groups=1)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        noised = batch["images"] + batch["noise"]
        made = module(noised, batch["steps"], class_labels=batch["steps"] % 4).sample
        return (made - batch["noise"]).square().mean()

    return module, loss, _noised(8)


def diffusers_autoencoder(seed: int) -> Entry:
    """An autoencoder's mean, decoded again."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    module = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=2,
                           down_block_types=("DownEncoderBlock2D",) * 2,
                           up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip

    def loss(module: Any, batch: Batch) -> Tensor:
        drawn = module.encode(batch["images"]).latent_dist
        made = module.decode(drawn.mode()).sample
        return (made - batch["images"]).square().mean() + 1e-3 * drawn.kl().mean()

    return module, loss, _noised(8)


def vit_pytorch_vit(seed: int) -> Entry:
    """Layers as lists of attention and function."""
    from vit_pytorch import ViT

    torch.manual_seed(seed)
    module = ViT(image_size=8, patch_size=4, num_classes=CLASSES, dim=WIDTH, depth=4, heads=2,
                 dim_head=8, mlp_dim=16, dropout=0.1)  # fmt: skip
    return module, _classes, _images(8)


def vit_pytorch_cross_scales(seed: int) -> Entry:
    """CrossViT: two sizes of patches, whose encoders look at each other."""
    from vit_pytorch.cross_vit import CrossViT

    torch.manual_seed(seed)
    module = CrossViT(image_size=8, num_classes=CLASSES, sm_dim=8, lg_dim=8, sm_patch_size=2,
                      sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=8, sm_enc_dim_head=4,
                      lg_patch_size=4, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=8,
                      lg_enc_dim_head=4, cross_attn_depth=1, cross_attn_heads=2,
                      cross_attn_dim_head=4, depth=2)  # fmt: skip
    return module, _classes, _images(8)


def segmentation_unet(seed: int) -> Entry:
    """Segmentation Models' Unet, with skips from an encoder of torchvision's."""
    import segmentation_models_pytorch as segmentation

    torch.manual_seed(seed)
    module = segmentation.Unet("resnet18", encoder_weights=None, classes=CLASSES,
                               encoder_depth=3, decoder_channels=(16, 8, 8),
                               decoder_use_norm=False)  # fmt: skip
    return module, _classes, _masks(16)


def mambapy_blocks(seed: int) -> Entry:
    """Mamba in plain torch, with its parallel scan as a Function."""
    from mambapy.mamba import Mamba, MambaConfig

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.inner = Mamba(MambaConfig(d_model=WIDTH, n_layers=4, d_state=4))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.inner(self.embed(tokens)))

    torch.manual_seed(seed)
    return Model(), _next_tokens, token_batch


def min_gru(seed: int) -> Entry:
    """A recurrence that is computed at once; the module's own loss."""
    from minGRU_pytorch.minLM import minLM

    torch.manual_seed(seed)
    module = minLM(num_tokens=VOCAB, dim=WIDTH, depth=2)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"], return_loss=True)

    return module, loss, token_batch


def soft_experts(seed: int) -> Entry:
    """Slots that are mixtures of a sample's tokens."""
    from soft_moe_pytorch import SoftMoE

    torch.manual_seed(seed)
    # Else those that are built in a job share its experts out over all of the job's ranks.
    options = {"seq_len": LENGTH, "num_experts": 2, "is_distributed": False}
    blocks = [SoftMoE(dim=WIDTH, **options) for _ in range(4)]

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = torch.randn(2, samples, LENGTH, WIDTH, generator=drawn).unbind()
        return inputs, targets

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0]) - batch[1]).square().mean()

    return nn.Sequential(*blocks), loss, make


def quantised_codes(seed: int) -> Entry:
    """A codebook that the forward moves, and that its library averages over ranks by itself."""
    from vector_quantize_pytorch import VectorQuantize

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.codes = VectorQuantize(dim=WIDTH, codebook_size=5, decay=0.8)

        def forward(self, x: Tensor) -> Any:
            codes, _, commitment = self.codes(self.encode(x))
            return self.decode(codes), commitment.sum()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = torch.randn(2, samples, LENGTH, WIDTH, generator=drawn).unbind()
        return inputs, targets

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, commitment = module(batch[0])
        return (made - batch[1]).square().mean() + commitment

    torch.manual_seed(seed)
    return Model(), loss, make


def local_windows(seed: int) -> Entry:
    """Attention within windows; the module's own loss."""
    from local_attention import LocalTransformer

    torch.manual_seed(seed)
    module = LocalTransformer(num_tokens=VOCAB, max_seq_len=8, dim=WIDTH, depth=2, heads=2,
                              dim_head=8, local_attn_window_size=2)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(batch["tokens"], return_loss=True)

    return module, loss, token_batch


def torch_transformer(seed: int) -> Entry:
    """PyTorch's own nn.Transformer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.inner = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
            given, wanted = self.embed(tokens), self.embed(targets)
            return self.head(self.inner(given, wanted, tgt_mask=mask.to(given.dtype)))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch["tokens"], batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    torch.manual_seed(seed)
    return Model(), loss, token_batch


_SMALL = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12,
          "decoder_ffn_dim": 12, "max_position_embeddings": 16, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
          "use_cache": False}  # fmt: skip


def _labels(module: nn.Module, batch: Batch) -> Tensor:
    return module(input_ids=batch["tokens"], labels=batch["targets"]).loss


def transformers_bart(seed: int) -> Entry:
    """Encoder and decoder with tied embeddings and learned positions."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    return BartForConditionalGeneration(BartConfig(**_SMALL)), _labels, token_batch


def transformers_wav2vec2(seed: int) -> Entry:
    """Sound: convolutions with group norm, positions by weight norm, and CTC."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(seed)
    config = Wav2Vec2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=12, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False, pad_token_id=0,
    )  # fmt: skip

    def make(drawn: torch.Generator, samples: int) -> Batch:
        sound = torch.randn(samples, 160, generator=drawn)
        return sound, torch.randint(1, VOCAB, (samples, 3), generator=drawn)

    def loss(module: nn.Module, batch: Batch) -> Any:
        made = module(batch[0]).logits.log_softmax(-1).transpose(0, 1)
        samples = made.shape[1]
        frames, symbols = (torch.full((samples,), n) for n in (made.shape[0], 3))
        return F.ctc_loss(made, batch[1], frames, symbols, reduction="sum"), 3 * samples

    return Wav2Vec2ForCTC(config), loss, make


def transformers_detr(seed: int) -> Entry:
    """Queries that look at patches, each with a class and a box."""
    from transformers import YolosConfig, YolosForObjectDetection

    torch.manual_seed(seed)
    config = YolosConfig(hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2,
                         intermediate_size=12, image_size=[8, 8], patch_size=4,
                         num_detection_tokens=3, num_labels=CLASSES)  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(batch[0])
        wanted = batch[1][:, None].expand(-1, made.logits.shape[1])
        boxes = made.pred_boxes.square().mean()
        return F.cross_entropy(made.logits.flatten(0, 1), wanted.flatten()) + boxes

    return YolosForObjectDetection(config), loss, _images(8)


def transformers_jamba_like(seed: int) -> Entry:
    """Layers of two kinds: state spaces in plain torch, and attention."""
    from transformers import BambaConfig, BambaForCausalLM

    torch.manual_seed(seed)
    config = BambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=12, attn_layer_indices=[1], mamba_n_heads=4,
        mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4, mamba_chunk_size=4, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch["tokens"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    return BambaForCausalLM(config), loss, token_batch


LIBRARIES: dict[Callable[[int], Entry], tuple[str, ...]] = {
    x_transformers_decoder: ("x_transformers",),
    x_transformers_with_memory: ("x_transformers",),
    x_transformers_translation: ("x_transformers",),
    x_transformers_images: ("x_transformers",),
    timm_vit: ("timm",),
    timm_swin: ("timm",),
    timm_convnext: ("timm",),
    timm_mixer: ("timm",),
    timm_efficientnet: ("timm",),
    torchvision_resnet: ("torchvision",),
    torchvision_resnet_group_norm: ("torchvision",),
    torchvision_vit: ("torchvision",),
    torchvision_swin: ("torchvision",),
    diffusers_unet: ("diffusers",),
    diffusers_unet_with_words: ("diffusers",),
    diffusers_dit: ("diffusers",),
    diffusers_autoencoder: ("diffusers",),
    vit_pytorch_vit: ("vit_pytorch",),
    vit_pytorch_cross_scales: ("vit_pytorch",),
    segmentation_unet: ("segmentation_models_pytorch",),
    mambapy_blocks: ("mambapy",),
    min_gru: ("minGRU_pytorch",),
    soft_experts: ("soft_moe_pytorch",),
    quantised_codes: ("vector_quantize_pytorch",),
    local_windows: ("local_attention",),
    torch_transformer: (),
    transformers_bart: ("transformers",),
    transformers_wav2vec2: ("transformers",),
    transformers_detr: ("transformers",),
    transformers_jamba_like: ("transformers",),
}
MODULES: tuple[Callable[[int], Entry], ...] = tuple(LIBRARIES)
