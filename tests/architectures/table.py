"""The table of architectures, and what is expected of each."""

import torch

from gomuon import LayerSpec
from tests.architectures import decoders, encoders, own_layers, plain, vision
from tests.architectures.case import Case

PROJECTIONS = ("*_proj.weight",)
STACKS = ("*.experts.gate_up_proj", "*.experts.down_proj")
ROUTERS = ("*.gate.weight",)
TOKENS = ("*embed_tokens.weight",)
FLOAT = torch.float32
TURNED = LayerSpec(transposed=True)  # stored inputs × outputs

DECODERS: dict[str, Case] = {
    "Llama": Case(
        decoders.llama, decoders.next_token, 88,
        matrix=PROJECTIONS, embedding=TOKENS, head=("lm_head.weight",),
    ),
    "Mistral": Case(
        decoders.mistral, decoders.next_token, 88,
        matrix=PROJECTIONS, embedding=TOKENS, head=("lm_head.weight",),
    ),
    "Gemma 2": Case(
        decoders.gemma2, decoders.next_token, 98, matrix=PROJECTIONS, embedding=TOKENS,
    ),
    "Qwen3": Case(
        decoders.qwen3, decoders.next_token, 88,
        matrix=PROJECTIONS, embedding=TOKENS, head=("lm_head.weight",),
    ),
    "Phi-3": Case(
        decoders.phi3, decoders.next_token, 88,
        matrix=PROJECTIONS, embedding=TOKENS, head=("lm_head.weight",),
    ),
    "GPT-NeoX": Case(
        decoders.gpt_neox, decoders.next_token, 84,
        matrix=("*.query_key_value.weight", "*.dense.weight", "*.dense_h_to_4h.weight",
                "*.dense_4h_to_h.weight"),
        embedding=("*embed_in.weight",), head=("lm_head.weight",),
    ),
    "OPT": Case(
        decoders.opt, decoders.next_token, 95,
        matrix=(*PROJECTIONS, "*.fc?.weight", "*.project_in.weight", "*.project_out.weight"),
        embedding=("*embed_tokens.weight", "*embed_positions.weight"),
    ),
    "GPT-2": Case(
        decoders.gpt2, decoders.next_token, 96,
        matrix=("*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"),
        embedding=("*.wte.weight", "*.wpe.weight"),
    ),
    "Mixtral": Case(
        decoders.mixtral, decoders.next_token, 95,
        matrix=(*PROJECTIONS, *STACKS), embedding=TOKENS, head=("lm_head.weight",),
        other=ROUTERS, as_layers=decoders.experts_as_layers,
    ),
    "Qwen3-MoE": Case(
        decoders.qwen3_moe, decoders.next_token, 95,
        matrix=(*PROJECTIONS, *STACKS), embedding=TOKENS, head=("lm_head.weight",),
        other=ROUTERS, as_layers=decoders.experts_as_layers,
    ),
    "GPT-OSS": Case(
        decoders.gpt_oss, decoders.next_token, 93,
        matrix=(*PROJECTIONS, *STACKS, "*.router.weight"), embedding=TOKENS,
        head=("lm_head.weight",), other=("*.gate_up_proj_bias", "*.down_proj_bias"),
        as_layers=decoders.experts_as_layers, dtype=FLOAT,
        settings={"routes": {"*.router.weight": "matrix"}}, by_function=("*.router.weight",),
    ),
    "DeepSeek-V3": Case(
        decoders.deepseek_v3, decoders.next_token, 90,
        matrix=("*a_proj.weight", "*a_proj_with_mqa.weight", "*b_proj.weight", *PROJECTIONS,
                *STACKS),
        embedding=TOKENS, head=("lm_head.weight",), other=ROUTERS,
        as_layers=decoders.experts_as_layers,
    ),
    "Mamba": Case(
        decoders.mamba, decoders.next_token, 94,
        matrix=("*.in_proj.weight", "*.x_proj.weight", "*.dt_proj.weight", "*.out_proj.weight"),
        missed=("*.conv1d.weight",), embedding=("*.embeddings.weight",), other=("*.A_log",),
        as_layers=decoders.mamba_as_layers, dtype=FLOAT,
        says="conv1d.weight.*its module was not called",
    ),
}  # fmt: skip

ENCODERS: dict[str, Case] = {
    "BERT": Case(
        encoders.bert, encoders.every_token, 95,
        matrix=("*.query.weight", "*.key.weight", "*.value.weight", "*.dense.weight"),
        embedding=("*_embeddings.weight",),
    ),
    "BERT, classifier": Case(
        encoders.bert_classifier, encoders.sentence_class, 95,
        matrix=("*.query.weight", "*.key.weight", "*.value.weight", "*.dense.weight"),
        embedding=("*_embeddings.weight",), head=("classifier.weight",),
    ),
    "ALBERT": Case(
        encoders.albert, encoders.every_token, 94,
        matrix=("*.query.weight", "*.key.weight", "*.value.weight", "*.dense.weight",
                "*.ffn.weight", "*.ffn_output.weight", "*.embedding_hidden_mapping_in.weight"),
        embedding=("*_embeddings.weight",),
    ),
    "DistilBERT": Case(
        encoders.distilbert, encoders.every_token, 95,
        matrix=("*_lin.weight", "*.lin?.weight", "vocab_transform.weight"),
        embedding=("*_embeddings.weight",),
    ),
    "T5": Case(
        encoders.t5, encoders.every_token, 99,
        matrix=("*.q.weight", "*.k.weight", "*.v.weight", "*.o.weight", "*.wi.weight",
                "*.wo.weight"),
        embedding=("shared.weight", "*.relative_attention_bias.weight"),
    ),
    "BART": Case(
        encoders.bart, encoders.every_token, 95,
        matrix=(*PROJECTIONS, "*.fc?.weight"),
        embedding=("*.shared.weight", "*.embed_positions.weight"),
    ),
    "ViT": Case(
        encoders.vit, encoders.picture_class, 95,
        matrix=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.o_proj.weight",
                "*.fc?.weight", "*.projection.weight"),
        embedding=("*.position_embeddings",), head=("classifier.weight",),
    ),
    "CLIP": Case(
        encoders.clip, encoders.pairs, 91,
        matrix=(*PROJECTIONS, "*.fc?.weight", "*.patch_embedding.weight"),
        embedding=("*.token_embedding.weight", "*.position_embedding.weight"),
        head=("text_projection.weight", "visual_projection.weight"),
    ),
    "Whisper": Case(
        encoders.whisper, encoders.transcript, 96,
        matrix=(*PROJECTIONS, "*.fc?.weight", "*.conv?.weight"),
        embedding=("*.embed_tokens.weight", "*.decoder.embed_positions.weight"),
        frozen=("*.encoder.embed_positions.weight",),
    ),
    "WavLM": Case(
        encoders.wavlm, encoders.sound_class, 84,
        matrix=(*PROJECTIONS, "*.conv.weight", "*.projection.weight", "*_dense.weight",
                "*.gru_rel_pos_linear.weight", "projector.weight"),
        embedding=("*.rel_attn_embed.weight",), head=("classifier.weight",),
        other=("*.pos_conv_embed.conv.parametrizations.weight.original1",),
        by_function=("*.attention.*_proj.weight",),
    ),
}  # fmt: skip

VISION: dict[str, Case] = {
    "timm ViT": Case(
        vision.timm_vit, vision.classes, 96,
        matrix=("*.qkv.weight", "*.proj.weight", "*.fc?.weight"),
        embedding=("pos_embed",), head=("head.weight",),
    ),
    "timm BEiT": Case(
        vision.timm_beit, vision.classes, 96,
        matrix=("*.qkv.weight", "*.proj.weight", "*.fc?.weight"),
        embedding=("pos_embed",), head=("head.weight",), by_function=("*.qkv.weight",),
    ),
    "timm Swin V2": Case(
        vision.timm_swin_v2, vision.classes_of_larger, 91,
        matrix=("*.qkv.weight", "*.proj.weight", "*.fc?.weight", "*.cpb_mlp.*.weight",
                "*.reduction.weight"),
        head=("head.fc.weight",), by_function=("*.qkv.weight",),
    ),
    "timm ConvNeXt": Case(
        vision.timm_convnext, vision.classes_of_larger, 96,
        matrix=("stem.0.weight", "*.conv_dw.weight", "*.fc?.weight", "*.downsample.1.weight"),
        head=("head.fc.weight",),
    ),
    "timm ResNet": Case(
        vision.timm_resnet, vision.classes_of_larger, 95,
        matrix=("conv1.weight", "*.conv?.weight", "*.downsample.0.weight"), head=("fc.weight",),
    ),
    "timm MLP-Mixer": Case(
        vision.timm_mixer, vision.classes, 95,
        matrix=("stem.proj.weight", "*.fc?.weight"), head=("head.weight",),
    ),
    "timm EfficientNet": Case(
        vision.timm_efficientnet, vision.classes_of_larger, 96,
        matrix=("conv_stem.weight", "*.conv*.weight", "conv_head.weight"),
        head=("classifier.weight",),
    ),
    "torchvision ResNet-18": Case(
        vision.torchvision_resnet18, vision.classes_of_larger, 99,
        matrix=("conv1.weight", "*.conv?.weight", "*.downsample.0.weight"), head=("fc.weight",),
    ),
}  # fmt: skip

PLAIN: dict[str, Case] = {
    "nn.Transformer": Case(
        plain.Translator, plain.next_token, 91,
        matrix=("*.in_proj_weight", "*.out_proj.weight", "*.linear?.weight"),
        embedding=("tokens.weight", "positions"), head=("generator.weight",),
        as_layers=plain.attention_as_layers,
    ),
    "LSTM": Case(
        plain.Recurrent, plain.next_token, 87,
        matrix=("project.weight",), identity=("lstm.weight_*",), embedding=("tokens.weight",),
        head=("head.weight",),
    ),
    "U-Net": Case(
        plain.UNet, plain.denoise, 89,
        matrix=("time_mlp.*.weight", "enter.weight", "down.weight", "middle.weight",
                "leave.weight"),
        head=("out.weight",), other=("up.weight",),
    ),
    "GAN": Case(
        plain.Adversaries, plain.judged, 78,
        matrix=("generator.0.weight", "generator.4.weight", "generator.9.weight",
                "discriminator.2.weight", "discriminator.4.weight"),
        head=("discriminator.7.weight",),
        other=("generator.7.weight", "discriminator.0.parametrizations.weight.original"),
        parts={"discriminator": plain.judged, "generator": plain.deceived},
    ),
    "variational autoencoder": Case(
        plain.Autoencoder, plain.evidence, 47,
        matrix=("encoder.0.weight", "decoder.0.weight"),
        head=("fc_mu.weight", "fc_logvar.weight", "decoder.2.weight"),
    ),
    "actor–critic": Case(
        plain.ActorCritic, plain.advantage, 94,
        matrix=("eyes.*.weight", "actor.0.weight"), head=("actor.2.weight", "critic.weight"),
    ),
    "graph network": Case(
        plain.GraphNetwork, plain.node_classes, 92,
        matrix=("first.weight", "second.weight"), head=("classifier.weight",),
        settings={
            "routes": {"first.weight": "matrix", "second.weight": "matrix"},
            "specs": {"first.weight": TURNED, "second.weight": TURNED},
        },
        as_layers=plain.graph_as_layers,
    ),
    "recommender": Case(
        plain.Recommender, plain.clicks, 89,
        matrix=("bottom.*.weight", "top.0.weight"), embedding=("tables.*.weight",),
        head=("top.2.weight",),
    ),
}  # fmt: skip

BLOCK = {f"blocks.*.{name}": "matrix" for name in ("q", "k", "v", "o", "up", "down")}
OWN: dict[str, Case] = {
    "LoRA": Case(
        own_layers.lora, decoders.next_token, 100,
        matrix=("*.lora_?.default.weight",),
        frozen=("*.base_layer.weight", "*.k_proj.weight", "*.mlp.*.weight", "*embed_tokens.weight",
                "*norm.weight", "*lm_head.weight"),
    ),
    "DoRA": Case(
        own_layers.dora, decoders.next_token, 90,
        matrix=("*.lora_?.default.weight",),
        frozen=("*.base_layer.weight", "*.k_proj.weight", "*.mlp.*.weight", "*embed_tokens.weight",
                "*norm.weight", "*lm_head.weight"),
    ),
    "linear layers of one's own": Case(
        own_layers.own_layers, plain.next_token, 87,
        matrix=("*.qkv.weight", "*.out.weight", "*.kernel"), embedding=("tokens.weight",),
        head=("lm_head.weight",),
        settings={
            "routes": {"blocks.*.weight": "matrix", "blocks.*.kernel": "matrix"},
            "specs": {"*.kernel": TURNED},
        },
        as_layers=own_layers.own_as_layers,
    ),
    "parameters and F.linear": Case(
        own_layers.bare_parameters, plain.next_token, 88,
        matrix=tuple(BLOCK), embedding=("tokens.weight",), head=("lm_head.weight",),
        settings={"routes": BLOCK}, by_function=("blocks.*",),
    ),
    "stacked qkv": Case(
        own_layers.stacked_qkv, plain.next_token, 87,
        matrix=("*.qkv_w", "*.out.weight", "*.mlp.*.weight"), embedding=("tokens.weight",),
        head=("lm_head.weight",),
        settings={"routes": {"*.qkv_w": "matrix"}}, as_layers=own_layers.stacked_as_layers,
    ),
}  # fmt: skip

CASES = {**DECODERS, **ENCODERS, **VISION, **PLAIN, **OWN}
