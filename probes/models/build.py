"""Presets and checkpoint folders as real transformers models, made directly on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from probes.models import PRESETS, Preset, checkpoint, is_path
from probes.models.outliers import plant

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def config_of(preset: Preset) -> PretrainedConfig:
    """The transformers configuration of a preset."""
    shape: dict[str, object] = {
        "vocab_size": preset.vocab,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.mlp,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "max_position_embeddings": preset.max_positions,
        "rms_norm_eps": preset.norm_eps,
        "tie_word_embeddings": preset.tied,
        "rope_parameters": _rope(preset),
        "use_cache": False,  # a cache makes layer_idx specialise: one graph per layer instead of one for all
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if preset.family != "qwen2":  # Qwen2 has no such key: it always divides hidden by heads
        shape["head_dim"] = preset.head_dim
    return AutoConfig.for_model(preset.family, **shape)


def _rope(preset: Preset) -> dict[str, object]:
    if not preset.llama3_rope:
        return {"rope_type": "default", "rope_theta": preset.rope_base}
    return {
        "rope_type": "llama3",
        "rope_theta": preset.rope_base,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    }


def build(
    model: str, *, device: str, dtype: torch.dtype, attention: str = "sdpa", seed: int = 0
) -> PreTrainedModel:
    """The model that `model` names, in training mode on `device`, its parameters in `dtype`.

    model: a preset's name (random weights from `seed`, made on the device) or a checkpoint folder.
    attention: a name that transformers' AttentionInterface knows.
    Raises ValueError for a model or an attention name that nobody knows; reaches for no hub.
    """
    if is_path(model):
        folder = checkpoint(model)
        made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, attn_implementation=attention
        )
        torch.nn.Module.to(made, device)
        made.config.use_cache = False
    else:
        made = _random(config_of(PRESETS[model]), device, dtype, attention, seed)
        if PRESETS[model].outliers:
            plant(made)
    made.train()
    return made


def _random(
    config: PretrainedConfig, device: str, dtype: torch.dtype, attention: str, seed: int
) -> PreTrainedModel:
    """Weights as transformers initialises them. `torch.device` as a context spares the copy from the host."""
    torch.manual_seed(seed)
    with torch.device(device):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return made


def with_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """LoRA adapters of `rank` on every linear layer but the head, in float32; all else is frozen.

    Raises ValueError where peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"adapters of rank {rank} need peft: pip install peft") from error
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return cast(PreTrainedModel, get_peft_model(model, config, autocast_adapter_dtype=True))


def twin(
    model: PreTrainedModel, *, dtype: torch.dtype | None = None, attention: str = "eager"
) -> PreTrainedModel:
    """A second, untouched model of the same class over the same weights, for a comparison.

    With the dtype unchanged it shares the parameters' storage, so it costs no memory until its backward.
    Nothing that was done to `model` (compiled layers, hooks, patches of its modules) is carried over.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = attention
    with torch.device("meta"):
        other = type(model)(config)
    parameters = dict(_named(model.named_parameters(remove_duplicate=False)))
    buffers = dict(_named(model.named_buffers()))
    for path, _ in list(other.named_parameters(remove_duplicate=False)):
        source = parameters[path]
        data = source.detach().to(dtype or source.dtype)
        _put(other, path, torch.nn.Parameter(data, requires_grad=source.requires_grad))
    for path, _ in list(other.named_buffers()):
        data = buffers[path].detach()
        _put(other, path, data.to(dtype) if dtype and data.is_floating_point() else data.clone())
    if config.tie_word_embeddings:
        other.get_output_embeddings().weight = other.get_input_embeddings().weight
    other.train()
    return other


def _named(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as in an unwrapped model: torch.compile of a module adds a part to the path."""
    for path, tensor in pairs:
        yield path.replace("_orig_mod.", ""), tensor


def _put(module: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    parent, _, name = path.rpartition(".")
    holder = module.get_submodule(parent)
    if isinstance(tensor, torch.nn.Parameter):
        holder._parameters[name] = tensor
    else:
        holder._buffers[name] = tensor
