"""Models of transformers, x-transformers and timm, as small as their configurations allow, with
random weights.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
import transformers
import x_transformers as x
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, WIDTH, CLASSES, SIDE = 61, 2, 8, 16, 3, 32


def random_numbers() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=random_numbers())


def tokens() -> Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=random_numbers())


def with_classes(**inputs: Tensor) -> dict[str, Tensor]:
    """Inputs, and a class for each sample."""
    return inputs | {"labels": torch.arange(BATCH)}


def plain_text() -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    return {"input_ids": tokens(), "labels": tokens()}


def text() -> dict[str, Tensor]:
    """The same with padding at the end of the second row."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return plain_text() | {"attention_mask": mask}


def bare_text() -> dict[str, Tensor]:
    return {"x": tokens()}


def labelled_text() -> dict[str, Tensor]:
    return with_classes(input_ids=tokens())


def unlabelled_images() -> dict[str, Tensor]:
    return {"pixel_values": normal(3, SIDE, SIDE)}


def bare_images() -> dict[str, Tensor]:
    return {"x": normal(3, SIDE, SIDE)}


def images() -> dict[str, Tensor]:
    return with_classes(**unlabelled_images())


def segmented() -> dict[str, Tensor]:
    """Images with a class for each pixel."""
    inputs = unlabelled_images()
    return inputs | {"labels": (inputs["pixel_values"][:, 0] > 0).long()}


def film() -> dict[str, Tensor]:
    return with_classes(pixel_values=normal(4, 3, SIDE, SIDE))


def sound() -> dict[str, Tensor]:
    return with_classes(input_values=normal(400))


def spectrogram() -> dict[str, Tensor]:
    return with_classes(input_values=normal(16, 8))


def speech() -> dict[str, Tensor]:
    return {"input_features": normal(8, 16), "labels": tokens()}


def frames() -> dict[str, Tensor]:
    return {"input_features": normal(32, 8), "labels": tokens()}


def captioned_images() -> dict[str, Any]:
    return {"input_ids": tokens(), **unlabelled_images(), "return_loss": True}


def questions() -> dict[str, Tensor]:
    return {"input_ids": tokens(), **images(), "labels": torch.eye(BATCH, CLASSES)}


class Architecture(NamedTuple):
    """A model and the keyword arguments of a call of it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    def make(self) -> nn.Module:
        """The model in train mode, with the same weights every time."""
        transformers.set_seed(0)
        return self.build().train()


def from_config(name: str, head: str, settings: dict[str, Any]) -> nn.Module:
    """A model of transformers."""
    config = getattr(transformers, f"{name}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model


def from_timm(name: str, settings: dict[str, Any]) -> nn.Module:
    """A model of timm. What it sets to 0, such as the last norm of a residual block, is random, so
    that all of the model has gradients.
    """
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **settings)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def x_transformer() -> nn.Module:
    layers = x.Decoder(
        dim=WIDTH, depth=2, heads=2, attn_dim_head=8, attn_dropout=0.1, ff_dropout=0.1
    )
    return x.AutoregressiveWrapper(
        x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    )


# fmt: off
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = {"vocab_size": VOCABULARY, **IDS}
WORDS = TOKENS | {"max_position_embeddings": 32}
LAYERS = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}
BERT = WORDS | LAYERS
LLAMA = BERT | {"num_key_value_heads": 1}
HEADS = LLAMA | {"head_dim": 8}
GPT = TOKENS | {"n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STACKS = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2,
    "num_heads": 2, "decoder_start_token_id": 0, **IDS,
}
TIMM_VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
TIMM_SWIN = {
    "img_size": SIDE, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2),
}
TIMM_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
CLASSIFIER = {"num_labels": CLASSES}
VIT = LAYERS | CLASSIFIER | {"image_size": SIDE, "patch_size": 8}
SWIN = CLASSIFIER | {
    "image_size": SIDE, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
    "window_size": 4,
}
CONVNEXT = CLASSIFIER | {
    "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1,
}
RESNET = CLASSIFIER | {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
PYRAMID = {
    "depths": [1, 1], "sr_ratios": [2, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2],
    "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
}
WAVES = LAYERS | {
    "vocab_size": VOCABULARY, "conv_dim": [8, 8], "conv_kernel": [8, 4], "conv_stride": [4, 4],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2, "classifier_proj_size": 8, "num_labels": CLASSES,
}
TOWERS = {
    "text_config": BERT, "vision_config": LAYERS | {"image_size": SIDE, "patch_size": 8},
    "projection_dim": 8,
}
# fmt: on


def entry(
    head: str, inputs: Callable[[], dict[str, Any]], name: str, *shared: dict[str, Any], **own: Any
) -> Architecture:
    settings = {key: value for part in (*shared, own) for key, value in part.items()}
    build = functools.partial(from_config, name, head, settings)
    return Architecture(f"{name}{head}", build, inputs)


def timm_model(name: str, **settings: Any) -> Architecture:
    build = functools.partial(from_timm, name, settings)
    return Architecture(f"timm {name}", build, bare_images)


decoder = functools.partial(entry, "ForCausalLM", text)
encoder = functools.partial(entry, "ForMaskedLM", text)
translator = functools.partial(entry, "ForConditionalGeneration", text)
classifier = functools.partial(entry, "ForImageClassification", images)

# fmt: off
DECODERS = [
    entry("LMHeadModel", text, "GPT2", GPT),
    decoder("GPTJ", GPT, rotary_dim=4),
    decoder("GPTNeo", WORDS, hidden_size=WIDTH, num_layers=2, num_heads=2, intermediate_size=24,
        attention_types=[[["global", "local"], 1]], window_size=4),
    decoder("GPTNeoX", BERT),
    decoder("OPT", WORDS, hidden_size=WIDTH, word_embed_proj_dim=8, num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=24),
    decoder("Bloom", TOKENS, hidden_size=WIDTH, n_layer=2, n_head=2),
    decoder("Mpt", TOKENS, d_model=WIDTH, n_layers=2, n_heads=2, max_seq_len=32),
    decoder("Falcon", BERT),
    decoder("XGLM", WORDS, d_model=WIDTH, ffn_dim=24, num_layers=2, attention_heads=2),
    decoder("Llama", LLAMA),
    decoder("Mistral", LLAMA, sliding_window=4),
    decoder("Mixtral", LLAMA, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True),
    decoder("Qwen2", LLAMA),
    decoder("Qwen2Moe", LLAMA, EXPERTS, shared_expert_intermediate_size=24),
    decoder("Qwen3", HEADS),
    decoder("Gemma", HEADS),
    decoder("Gemma2", HEADS, sliding_window=4),
    decoder("Phi", LLAMA, partial_rotary_factor=0.5),
    decoder("Phi3", LLAMA),
    decoder("StableLm", LLAMA, partial_rotary_factor=0.5),
    *(decoder(name, LLAMA) for name in ("Olmo", "Olmo2", "Granite", "Cohere", "Starcoder2")),
    decoder("DeepseekV3", LLAMA, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        num_key_value_heads=2),
    entry("ForCausalLM", plain_text, "Mamba", TOKENS, hidden_size=WIDTH, state_size=4,
        num_hidden_layers=2),
    entry("ForCausalLM", plain_text, "Mamba2", TOKENS, hidden_size=WIDTH, state_size=4,
        num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    entry("LMHeadModel", text, "CTRL", GPT, dff=24),
    entry("LMHeadModel", plain_text, "XLNet", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2,
        n_head=2, d_inner=24),
    decoder("RecurrentGemma", HEADS, num_hidden_layers=3, lru_width=WIDTH, attention_window_size=4),
    decoder("Jamba", LLAMA, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4),
    decoder("GptOss", HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    decoder("Lfm2", LLAMA, layer_types=["conv", "full_attention"], block_ff_dim=24),
    Architecture("x-transformers", x_transformer, bare_text),
]
ENCODERS = [
    encoder("Bert", BERT),
    encoder("Roberta", BERT),
    encoder("DistilBert", vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24,
        max_position_embeddings=32),
    *(encoder(name, BERT, embedding_size=8) for name in ("Albert", "Electra")),
    *(encoder(name, BERT, relative_attention=True, pos_att_type=["c2p", "p2c"])
        for name in ("Deberta", "DebertaV2")),
    encoder("MPNet", BERT),
    encoder("ModernBert", BERT, local_attention=4, sep_token_id=2, cls_token_id=1),
    encoder("Longformer", BERT, attention_window=4),
    encoder("BigBird", BERT, attention_type="original_full"),
    entry("ForMaskedLM", plain_text, "FNet", BERT),
    encoder("ConvBert", BERT, embedding_size=8, num_groups=1),
    encoder("Funnel", vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1,
        d_model=WIDTH, n_head=2, d_head=8, d_inner=24),
    encoder("RoFormer", BERT, embedding_size=8),
    entry("ForSequenceClassification", labelled_text, "Canine", LAYERS, CLASSIFIER, pad_token_id=0,
        num_hash_functions=2, num_hash_buckets=16, max_position_embeddings=32, downsampling_rate=2,
        upsampling_kernel_size=2, local_transformer_stride=4),
    encoder("Nystromformer", BERT, num_landmarks=8, segment_means_seq_len=8),
    # LSH draws from torch.seed(), and no two runs are alike
    entry("ForMaskedLM", plain_text, "Reformer", vocab_size=VOCABULARY,
        attn_layers=["local", "local"], attention_head_size=8, hidden_size=WIDTH,
        num_attention_heads=2, feed_forward_size=24, axial_pos_embds_dim=[8, 8],
        axial_pos_shape=[2, 4], local_attn_chunk_length=4, hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0, max_position_embeddings=8, is_decoder=False),
]
TRANSLATORS = [
    translator("T5", T5),
    translator("LongT5", T5, local_radius=3),
    translator("SwitchTransformers", T5, num_decoder_layers=2, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    *(translator(name, WORDS, STACKS) for name in ("Bart", "MBart", "Pegasus")),
    entry("MTModel", text, "Marian", WORDS, STACKS),
    translator("ProphetNet", WORDS, hidden_size=WIDTH, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, decoder_start_token_id=0, ngram=2),
    translator("LED", STACKS, TOKENS, max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32, attention_window=4),
]
VISION = [
    *(classifier(name, VIT) for name in ("ViT", "DeiT")),
    classifier("Beit", VIT, use_relative_position_bias=True),
    *(classifier(name, SWIN) for name in ("Swin", "Swinv2")),
    *(classifier(name, CONVNEXT) for name in ("ConvNext", "ConvNextV2")),
    classifier("ResNet", RESNET),
    classifier("RegNet", RESNET, groups_width=8),
    classifier("EfficientNet", CLASSIFIER, image_size=SIDE, width_coefficient=0.25,
        depth_coefficient=0.3, hidden_dim=320, kernel_sizes=[3, 5], in_channels=[32, 16],
        out_channels=[16, 24], strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 2],
        depthwise_padding=[]),
    classifier("MobileNetV1", CLASSIFIER, depth_multiplier=0.25, image_size=SIDE,
        classifier_dropout_prob=0.1),
    classifier("MobileNetV2", CLASSIFIER, depth_multiplier=0.25, image_size=SIDE),
    classifier("MobileViT", CLASSIFIER, image_size=SIDE, hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2, expand_ratio=1.0),
    entry("ForSemanticSegmentation", segmented, "Segformer", CLASSIFIER, PYRAMID,
        decoder_hidden_size=8),
    entry("ForSemanticSegmentation", segmented, "DPT", VIT, backbone_out_indices=[0, 1],
        reassemble_factors=[2, 1], neck_hidden_sizes=[8, 16], fusion_hidden_size=8,
        semantic_loss_ignore_index=255),
    classifier("Dinov2", VIT, mlp_ratio=2),
    classifier("Pvt", CLASSIFIER, num_encoder_blocks=2, depths=[1, 1],
        sequence_reduction_ratios=[2, 1], num_attention_heads=[1, 2], image_size=SIDE,
        hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2]),
    classifier("PvtV2", CLASSIFIER, PYRAMID, image_size=SIDE),
    classifier("PoolFormer", CLASSIFIER, hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2,
        patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    classifier("Levit", CLASSIFIER, image_size=SIDE, hidden_sizes=[8, 16, 16],
        num_attention_heads=[1, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]),
    entry("ForPreTraining", unlabelled_images, "ViTMAE", LAYERS, image_size=SIDE, patch_size=8,
        decoder_hidden_size=WIDTH, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=24),
]
TIMM = [
    timm_model("vit_tiny_patch16_224", **TIMM_VIT, drop_path_rate=0.1),
    *(timm_model(name, **TIMM_VIT) for name in (
        "vit_relpos_small_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224",
        "eva02_tiny_patch14_224", "cait_xxs24_224")),
    timm_model("xcit_nano_12_p16_224", img_size=SIDE, embed_dim=WIDTH, depth=2, num_heads=2),
    timm_model("swin_tiny_patch4_window7_224", **TIMM_SWIN),
    timm_model("swinv2_tiny_window8_256", **TIMM_SWIN),
    timm_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    timm_model("resnet18", **TIMM_RESNET),
    timm_model("resnet50d", **TIMM_RESNET, drop_block_rate=0.1),
    timm_model("seresnet50", **TIMM_RESNET),
    timm_model("densenet121", block_config=(1, 1), growth_rate=8),
    *map(timm_model, (
        "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "ghostnet_050", "regnetx_002",
        "edgenext_xx_small", "mobilevit_xxs")),
    timm_model("pvt_v2_b0", depths=(1, 1, 1, 1)),
    timm_model("mambaout_femto", depths=(1, 1), dims=(16, 24)),
    *map(timm_model, (
        "inception_next_atto", "starnet_s1", "fastvit_t8", "repvit_m0_9", "nf_regnet_b0")),
]
FILM = [entry("ForVideoClassification", film, "VideoMAE", VIT, num_frames=4)]
SOUND = [
    entry("ForSequenceClassification", sound, "Wav2Vec2", WAVES),
    entry("ForSequenceClassification", sound, "Hubert", WAVES),
    entry("ForAudioClassification", spectrogram, "AST", LAYERS, CLASSIFIER, patch_size=4,
        frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8),
    entry("ForConditionalGeneration", speech, "Whisper", STACKS, TOKENS, num_mel_bins=8,
        max_source_positions=8, max_target_positions=16),
    entry("ForConditionalGeneration", frames, "Speech2Text", STACKS, TOKENS,
        input_feat_per_channel=8, conv_channels=8, max_source_positions=32,
        max_target_positions=16),
]
SEVERAL = [
    entry("Model", captioned_images, "CLIP", TOWERS),
    entry("Model", captioned_images, "Siglip",
        {name: TOWERS[name] for name in ("text_config", "vision_config")}),
    entry("ForQuestionAnswering", questions, "Vilt", VIT, vocab_size=VOCABULARY,
        max_position_embeddings=32),
]
# fmt: on
ARCHITECTURES = [*DECODERS, *ENCODERS, *TRANSLATORS, *VISION, *TIMM, *FILM, *SOUND, *SEVERAL]


def enable_checkpointing(model: Any) -> bool:
    """Enable the model's own checkpointing. Return False if it has none."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError):
        return False
    return True


def loss_of(out: Any) -> Tensor:
    """Return the loss that a model returned, or the cross entropy of logits, which models of timm
    return.
    """
    if not isinstance(out, Tensor):
        loss: Tensor = out.loss
        return loss
    if not out.dim():
        return out
    return F.cross_entropy(out.float(), torch.arange(len(out)) % out.shape[1])


class Refused(NamedTuple):
    """What is not run: a call of `apply(..., train=train)` or its backward raises `error`."""

    architecture: Architecture
    train: bool
    error: type[Exception]
    message: str
    why: str


RWKV = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "attention_hidden_size": WIDTH, "intermediate_size": 24, "context_length": 32,
}  # fmt: skip
REFUSED = [
    Refused(
        timm_model("convit_tiny", **TIMM_VIT),
        True,
        ValueError,
        "call the module once before `make_functional`",
        "its first forward gives a buffer its shape; call the module once before `make_functional`",
    ),
    Refused(
        entry("ForCausalLM", plain_text, "Rwkv", RWKV),
        False,
        RuntimeError,
        "wrote into its parameter rwkv.blocks.0.attention.output.weight",
        "only `train=False`: in eval mode its forward divides its weights in place; "
        "`rescale_every=0` keeps them",
    ),
]
