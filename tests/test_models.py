"""Presets are the published models; twins are the same model, untouched."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from probes.models import PRESETS, check_name, train_flops
from probes.models.build import build, config_of, twin
from probes.text import tokens

TINY = [name for name in PRESETS if name.startswith("tiny-")]
# Published sizes of the checkpoints, in parameters, a tied head counted once.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "llama-3.2-1b": 1_235_814_400,
}
# hidden, MLP, layers, heads, KV heads, head dim, vocabulary, tied, RoPE base, RMSNorm epsilon; as published.
FIGURES = {
    "qwen2.5-0.5b": (896, 4_864, 24, 14, 2, 64, 151_936, True, 1e6, 1e-6),
    "qwen2.5-1.5b": (1_536, 8_960, 28, 12, 2, 128, 151_936, True, 1e6, 1e-6),
    "qwen2.5-7b": (3_584, 18_944, 28, 28, 4, 128, 152_064, False, 1e6, 1e-6),
    "qwen3-0.6b": (1_024, 3_072, 28, 16, 8, 128, 151_936, True, 1e6, 1e-6),
    "qwen3-4b": (2_560, 9_728, 36, 32, 8, 128, 151_936, True, 1e6, 1e-6),
    "llama-3.2-1b": (2_048, 8_192, 16, 32, 8, 64, 128_256, True, 5e5, 1e-5),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_built_model_has_exactly_the_published_figures(name: str) -> None:
    """Of the modules where they show it, of the configuration elsewhere: Qwen2's has no head dimension."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(PRESETS[name]))
    config, layers = model.config, model.model.layers
    attention, mlp = layers[0].self_attn, layers[0].mlp
    vocab, hidden = model.get_input_embeddings().weight.shape
    assert FIGURES[name] == (
        hidden,
        mlp.gate_proj.out_features,
        len(layers),
        attention.q_proj.out_features // attention.head_dim,
        attention.k_proj.out_features // attention.head_dim,
        attention.head_dim,
        vocab,
        model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        config.rope_parameters["rope_theta"],
        config.rms_norm_eps,
    )
    assert hasattr(attention, "q_norm") == name.startswith("qwen3")
    assert (config.rope_parameters["rope_type"] == "llama3") == name.startswith("llama")


def test_the_public_presets_are_the_ones_with_published_figures() -> None:
    planted = {name for name in PRESETS if name.endswith("-outlier")}
    assert {name.removesuffix("-outlier") for name in planted} < {*FIGURES, *TINY}
    assert set(PRESETS) - planted == {*FIGURES, *TINY} - planted
    assert set(PUBLISHED) == set(FIGURES)


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_has_nothing_to_warn_of_in_a_preset(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It does where the context before scaling is not shorter than the whole, as in a small llama3 preset."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        config_of(PRESETS[name]).validate_rope()
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(PRESETS[name]))
    counted = sum(p.numel() for p in model.parameters())
    assert counted == PUBLISHED[name]
    assert abs(PRESETS[name].parameters / counted - 1) < 1e-3  # the plain data leave out norms and biases


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_preset_trains_and_is_the_class_it_says(name: str) -> None:
    preset = PRESETS[name]
    model = build(name, device="cpu", dtype=torch.float32)
    ids = tokens(1, 16, "cpu")
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert model.config.model_type == preset.family
    assert all(p.grad is not None for p in model.parameters())
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == preset.tied


def test_tiny_presets_cover_every_class_and_head_count() -> None:
    covered = {(PRESETS[n].family, PRESETS[n].heads, PRESETS[n].kv_heads) for n in TINY}
    assert covered == {(f, h, 2) for f in ("qwen2", "qwen3", "llama") for h in (4, 6, 12)}


def test_the_llama_preset_scales_its_rotary_frequencies() -> None:
    with torch.device("meta"):
        config = config_of(PRESETS["llama-3.2-1b"])
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["original_max_position_embeddings"] < config.max_position_embeddings


def test_the_same_seed_builds_the_same_weights_and_leaves_the_default_dtype_alone() -> None:
    one = build("tiny-qwen2-4h", device="cpu", dtype=torch.bfloat16, seed=3)
    two = build("tiny-qwen2-4h", device="cpu", dtype=torch.bfloat16, seed=3)
    other = build("tiny-qwen2-4h", device="cpu", dtype=torch.bfloat16, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["tiny-qwen2-4h", "tiny-qwen3-6h", "tiny-llama-4h"])
def test_a_twin_computes_the_same_from_the_same_storage(name: str) -> None:
    model = build(name, device="cpu", dtype=torch.float32, attention="eager")
    other = twin(model, attention="eager")
    ids = tokens(1, 32, "cpu")
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs)


def test_a_twin_carries_nothing_over_of_what_was_done_to_the_model() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    calls: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("hook"))
    model.model.layers[1].compile(backend=lambda *_: calls.append("compiled"))
    twin(model)(input_ids=tokens(1, 8, "cpu"))
    assert calls == []


def test_a_wider_twin_keeps_ties_and_widens_buffers() -> None:
    other = twin(build("tiny-qwen2-4h", device="cpu", dtype=torch.float16), dtype=torch.float64)
    assert {t.dtype for t in (*other.parameters(), *other.buffers())} == {torch.float64}
    assert other.get_input_embeddings().weight is other.get_output_embeddings().weight


def test_a_local_checkpoint_folder_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = build("tiny-llama-6h", device="cpu", dtype=torch.float32, seed=7)
    saved.save_pretrained(folder)
    check_name(str(folder))
    loaded = build(str(folder), device="cpu", dtype=torch.float32, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert loaded.training
    assert loaded.config.use_cache is False


def test_an_unknown_model_names_the_nearest_preset() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'qwen2\.5-1\.5b'"):
        check_name("qwen2.5-1.5")
    with pytest.raises(ValueError, match=r"config\.json is not there"):
        check_name("./nowhere")


def test_flops_are_six_per_weight_and_token_and_attention_sees_half() -> None:
    preset = PRESETS["tiny-qwen2-4h"]
    plain = 6 * preset.matmul_parameters
    short, long = train_flops(preset, 1, 1), train_flops(preset, 1, 1_001)
    one_key = 12 * preset.layers * preset.heads * preset.head_dim
    assert short == plain + one_key
    assert long == 1_001 * (plain + one_key * 501)
    assert train_flops(preset, 3, 64) == 3 * train_flops(preset, 1, 64)


def test_flops_agree_with_what_torch_counts() -> None:
    """Within the halves of attention that a causal mask leaves out, which torch's counter does not know."""
    from torch.utils.flop_counter import FlopCounterMode

    preset, seq = PRESETS["tiny-qwen2-6h"], 64
    model = build(preset.name, device="cpu", dtype=torch.float32, attention="eager")
    ids = tokens(1, seq, "cpu")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    full_attention = 12 * preset.layers * preset.heads * preset.head_dim * seq * seq
    ours = train_flops(preset, 1, seq) + full_attention * (1 - (seq + 1) / (2 * seq))
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-3)


def test_tokens_are_bytes_of_real_text_and_rows_differ() -> None:
    ids = tokens(3, 500, "cpu")
    assert ids.shape == (3, 500)
    assert ids.dtype == torch.int64
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 256
    assert "the" in bytes(ids[0].tolist()).decode().lower()
    assert not torch.equal(ids[0], ids[1])
    assert torch.equal(ids, tokens(3, 500, "cpu"))


def test_a_sequence_longer_than_the_text_goes_round() -> None:
    whole = tokens(1, 300_000, "cpu")[0]
    length = 252_339
    assert torch.equal(whole[:1_000], whole[length : length + 1_000])
