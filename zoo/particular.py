"""Fields that must fit one another in a way that no name tells, by the name of the configuration class; and what one
asks of its parts."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

_STRIDES = {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 16}
_CONVOLUTIONS = {
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 20],
    "kernel_sizes": [3, 3, 5],
    "strides": [1, 1, 2],
    "num_block_repeats": [1, 1, 2],
    "expand_ratios": [1, 6, 6],
    "depth_coefficient": 1.0,
    "hidden_dim": 2560,
}
_BACKBONE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
    "drop_path_rate": 0.0,
}
_NECK = {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16}
_DEPTH = {
    "backbone_config": {"model_type": "dinov2", **_BACKBONE},
    **_NECK,
    "depth_estimation_type": "metric",  # the other ends with a ReLU, behind which much is zero
}
_MIXED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]

PARTICULAR: dict[str, dict[str, Any]] = {
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 8.0},  # both are taken to be there
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": dict(_ROPE)}},
    "Dots3NoteTextConfig": {
        "num_key_value_heads": 4,
        "layer_types": ["indexed_attention"] * 4,
        "index_head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    "BeitConfig": {"out_indices": [1, 2, 3, 4]},
    "EfficientNetConfig": dict(_CONVOLUTIONS),
    "AlignVisionConfig": dict(_CONVOLUTIONS),
    "AlignConfig": {"projection_dim": 40},
    "UperNetConfig": {
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "hidden_size": 32,
        "auxiliary_in_channels": 32,
        "auxiliary_channels": 16,
    },
    "Tipsv2DptConfig": {"backbone_config": {"model_type": "tipsv2_vision_model", **_BACKBONE}, **_NECK},
    "DepthAnythingConfig": dict(_DEPTH),
    "PromptDepthAnythingConfig": dict(_DEPTH),
    "ZoeDepthConfig": {"backbone_config": {"model_type": "beit", **_BACKBONE}, **_NECK, "bottleneck_features": 16},
    "ShieldGemma2Config": {"yes_token_index": 3, "no_token_index": 4},
    "KyutaiSpeechToTextConfig": {"num_codebooks": 4, "codebook_vocab_size": 17},
    "ZambaConfig": {"layers_block_type": _MIXED},  # a block that is shared needs another one
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "FunAsrNanoEncoderConfig": {"fsmn_kernel_size": 11},
    "MimiConfig": {"upsample_groups": 64, "num_filters": 8, "num_quantizers": 4, "codebook_size": 16},
    "MoshiConfig": {"num_codebooks": 4},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "VibeVoiceAcousticTokenizerEncoderConfig": dict(_STRIDES),
    "VibeVoiceAcousticTokenizerConfig": dict(_STRIDES),
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 64},
    "PerceiverConfig": {"num_cross_attention_heads": 1},
    "MoonshineStreamingEncoderConfig": {"sliding_windows": ((16, 4), (16, 4), (16, 0), (16, 0))},
    "DepthProConfig": {
        "patch_size": 32,
        "fusion_hidden_size": 16,
        "intermediate_hook_ids": (2, 1),
        "intermediate_feature_dims": (16, 16),
        "scaled_images_ratios": (0.5, 1.0),
        "scaled_images_overlap_ratios": (0.0, 0.25),
        "scaled_images_feature_dims": (16, 16),
        "merge_padding_value": 1,
    },
    "DINOv3ViTConfig": {"pos_embed_rescale": None},  # by a number that is drawn
    "Sapiens2Config": {"pos_embed_rescale": None},
    "CHMv2Config": {
        "post_process_channels": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
        "number_output_channels": 16,
        "norm_strategy": "softmax",  # the others begin with a ReLU, behind which all may be zero
        "bins_strategy": "linear",
        "max_depth": 1.0,
    },
    "DiffusionGemmaConfig": {"canvas_length": 8},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Molmo2Config": {"image_patch_id": 120},
    "Molmo2VisionConfig": {"image_size": [32, 32], "num_position_embeddings": 64},
}

_SLIDING = ["sliding_attention", "full_attention"] * 2

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "Gemma4AssistantConfig": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "layer_types": list(_SLIDING),
        }
    },
    "Gemma4UnifiedAssistantConfig": {
        "text_config": {"num_kv_shared_layers": 2, "layer_types": list(_SLIDING), "global_head_dim": 16}
    },
    "DepthProConfig": {
        name: {"image_size": 32} for name in ("image_model_config", "patch_model_config", "fov_model_config")
    },
    "CHMv2Config": {
        "backbone_config": {
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": True,
            "apply_layernorm": True,
            "return_class_token": True,
        }
    },
    "NemotronH_Omni_Reasoning_V3_Config": {"audio_config": {"projection_hidden_size": 64, "projection_bias": False}},
    "Sapiens2Config": {"head_config": {"upsample_out_channels": [16, 16], "conv_out_channels": [16]}},
}
