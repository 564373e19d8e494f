"""precision: what leaves its dtype is named with module and value; what stays inside is ok."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from harness.rows import AttentionReport, Result
from probes import precision
from probes.models.build import build
from probes.models.outliers import CHANNELS
from probes.precision import PrecisionAxes, bf16, casts, reach, work
from probes.precision.backward import first_nonfinite_gradient
from probes.precision.found import Found, headroom
from probes.precision.judge import judge
from probes.precision.reach import Largest
from probes.text import tokens
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task
from tests.test_cli import harness

pytestmark = pytest.mark.usefixtures("clean_dynamo")
TINY, OUTLIER = "tiny-qwen2-4h", "tiny-qwen2-4h-outlier"
FP16_MAX = 65_504.0


def cell(*, device: str = "cpu", **axes: object) -> Result:
    chosen = msgspec.convert({"seq": 64, **axes}, PrecisionAxes)
    return work.run(chosen, task(device))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "amp-fp16", "amp-bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_preset_is_ok_in_every_precision(kind: str, attention: str) -> None:
    found = cell(precision=kind, attention=attention)
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["first_overflow_forward"] == found.facts["first_overflow_backward"] == "none"


@pytest.mark.parametrize("kind", ["fp16", "amp-fp16"])
def test_the_outlier_preset_overflows_in_fp16_where_scores_are_written_out(kind: str) -> None:
    found = cell(model=OUTLIER, precision=kind, attention="eager")
    assert found.verdict == "nonfinite", found.verdict_reason
    assert "model.layers.0.self_attn.o_proj: 0 inf" in found.verdict_reason
    assert "unscaled" in found.verdict_reason
    assert float(found.facts["qk_unscaled"] or 0) > FP16_MAX > float(found.facts["qk_scaled"] or 0)
    assert found.facts["qk_in"] == "model.layers.0.self_attn"


def test_the_outlier_preset_is_near_the_edge_in_fp16_where_scores_are_not() -> None:
    found = cell(model=OUTLIER, precision="fp16")
    assert found.verdict == "caveat", found.verdict_reason
    assert "less than 2 powers of two are left in float16" in found.verdict_reason
    assert 0 < float(found.facts["headroom_powers_of_two"] or 0) < 2


@pytest.mark.parametrize("kind", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_outlier_preset_is_ok_with_float32s_exponents(kind: str, attention: str) -> None:
    if kind == "amp-bf16" and bf16.support("cpu")[0] != "native":
        pytest.skip("bfloat16 is not native on this CPU, which is a caveat")
    found = cell(model=OUTLIER, precision=kind, attention=attention)
    assert found.verdict == "ok", found.verdict_reason


@pytest.mark.parametrize("seed", range(3))
def test_the_outlier_preset_reaches_beyond_1e4_in_a_few_channels_to_the_end(seed: int) -> None:
    model = build(OUTLIER, device="cpu", dtype=torch.float32, seed=seed)
    with torch.no_grad():
        out = model.model(input_ids=tokens(1, 128, "cpu"), output_hidden_states=True, use_cache=False)
    embedded, *stream = out.hidden_states[:-1]  # the last one is normed
    assert float(embedded.abs().max()) < 1
    for hidden_BSH in stream:
        most_H = hidden_BSH.abs().amax((0, 1))
        assert 1e4 < float(most_H.max()) < FP16_MAX
        assert int((most_H > 1e3).sum()) == CHANNELS


def test_a_planted_overflow_in_one_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*given: object, **options: object) -> nn.Module:
        model = build(*given, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(6e4)
        return model

    monkeypatch.setattr("probes.train_step.training.build", planted)
    found = cell(precision="fp16")
    assert found.verdict == "nonfinite"
    assert found.verdict_reason.startswith("forward: model.layers.1.mlp.up_proj: ")
    assert "its input was finite, at most" in found.verdict_reason
    assert float(found.facts["largest_activation"] or 0) > FP16_MAX  # what float32 would have reached
    assert cell(precision="fp32").verdict == "ok"


def test_a_planted_overflow_in_one_modules_backward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*given: object, **options: object) -> nn.Module:
        model = build(*given, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.zero_()  # its product is zero, so all is finite forward
            model.model.layers[1].mlp.down_proj.weight.fill_(6e4)
        return model

    monkeypatch.setattr("probes.train_step.training.build", planted)
    found = cell(precision="fp16", scale=2.0**16)
    assert found.verdict == "caveat", found.verdict_reason
    assert found.facts["first_overflow_forward"] == "none"
    told = str(found.facts["first_overflow_backward"])
    assert told.startswith("model.layers.1.mlp.down_proj: the gradient of its input"), told
    assert f"(finite at {found.facts['finite_loss_scale']:,.0f})" in found.verdict_reason


def test_a_checkpoint_whose_weights_do_not_fit_is_named(tmp_path: Path) -> None:
    model = build(TINY, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path)
    found = cell(model=str(tmp_path), precision="fp16")
    assert found.verdict == "nonfinite"
    assert "float16: model.layers.1.mlp.down_proj.weight: 1 of" in found.verdict_reason
    assert cell(model=str(tmp_path), precision="fp32").verdict == "ok"


def test_a_loss_scale_that_the_loss_cannot_take_is_named_and_its_skipped_steps_are_counted() -> None:
    found = cell(precision="amp-fp16", scale=2.0**26, updates=9)
    assert found.verdict == "caveat", found.verdict_reason
    assert "lm_head: the gradient that arrived at it" in found.verdict_reason
    fits = float(found.facts["finite_loss_scale"] or 0)
    assert found.facts["skipped_steps"] == round(26 - math.log2(fits)) > 0
    assert len(found.loss) == 9
    assert cell(precision="amp-fp16", scale=fits, updates=2).facts["skipped_steps"] == 0


def test_updates_that_are_all_skipped_are_no_training() -> None:
    found = cell(precision="amp-fp16", scale=2.0**40, updates=2)
    assert found.verdict == "nonfinite"
    assert "GradScaler skipped all 2 updates" in found.verdict_reason


def test_the_module_whose_backward_overflows_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).half()
    with torch.no_grad():
        model[1].weight.fill_(3e4)
        for layer in model:
            layer.bias.zero_()  # of an input of zeros all is zero: nothing overflows forward

    def backward() -> None:
        model.zero_grad()
        model(torch.zeros(2, 8, dtype=torch.float16, requires_grad=True)).mul(64).sum().backward()

    told = first_nonfinite_gradient(model, backward)
    assert told.startswith("1: the gradient of its input"), told
    with torch.no_grad():
        model[1].weight.fill_(1e-3)
    assert first_nonfinite_gradient(model, backward) == ""
    assert not any(m._backward_hooks or m._forward_hooks for m in model.modules())


def test_largest_values_are_those_of_the_tensors_kept_in_the_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4) * 3)
    seen = reach.maxima(model, lambda: model(torch.ones(1, 4)))
    assert reach.largest_of(seen) == Largest(3.0, "0")
    assert reach.largest_of(seen, {("input of 0", 0)}) == Largest(1.0, "input of 0")
    assert reach.kept_in(seen, torch.float16) == set()


def test_scores_are_those_of_the_formula() -> None:
    model = build(TINY, device="cpu", dtype=torch.float32, attention=reach.attention_name())
    one = model.model.layers[1].self_attn
    kept: list[torch.Tensor] = []
    one.q_proj.register_forward_hook(lambda m, i, o: kept.append(o))
    one.k_proj.register_forward_hook(lambda m, i, o: kept.append(o))
    with torch.no_grad(), reach.watching_scores(model) as scores:
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False
        )  # position 0: RoPE turns nothing
    q_HD, k_HD = (t.reshape(-1, one.head_dim) for t in kept)
    products = (q_HD * k_HD.repeat_interleave(one.num_key_value_groups, 0)).sum(-1)
    assert scores.unscaled.value >= float(products.abs().max()) * (1 - 1e-5)
    assert scores.scaled.value == pytest.approx(scores.unscaled.value * one.scaling)
    assert not hasattr(one, "_scores")


def test_compiled_code_skips_roundings_and_emulation_puts_them_back() -> None:
    told = list(casts.demonstrate("cpu").values())
    assert told == ["inf", "1000", "inf"]


@pytest.mark.slow
def test_a_compiled_model_is_held_against_eager_with_and_without_emulation() -> None:
    found = cell(precision="fp16", compile="layers", seq=16)
    assert found.verdict == "ok", found.verdict_reason
    assert 0 < float(found.facts["compiled_to_eager"] or 0) < 0.05
    assert isinstance(found.facts["emulation_moves_towards_eager"], bool)
    assert found.compile is not None
    assert (found.compile.graphs, found.compile.fallbacks) == (1, ())


def test_distances_are_of_all_gradients_and_none_where_one_is_not_finite() -> None:
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert casts.distance(one, one) == 0.0
    assert casts.distance({"a": torch.tensor([3.0]), "b": torch.tensor([9.0])}, one) == 1.0
    assert casts.distance({"a": torch.tensor([torch.inf]), "b": one["b"]}, one) is None


def test_bfloat16_is_tried_and_a_wrong_product_is_no_support(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bf16.support("cpu")[0] in ("native", "emulated", "unknown")
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: torch.mm(a, b) * (1.25 if a.dtype == torch.bfloat16 else 1)
    )
    assert bf16.support("cpu") == ("none", "a product in bfloat16 is off by 0.25 of its largest element")


def test_torch_refuses_to_scale_fp16_parameters_and_so_do_we() -> None:
    reason = precision.skip(PrecisionAxes(precision="fp16", updates=1), "cpu")
    assert "GradScaler refuses fp16 parameters" in reason
    scaler = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler.scale(weight.sum().float()).backward()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(torch.optim.AdamW([weight]))


def test_a_row_says_which_attention_ran_and_another_one_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cell(precision="fp16", attention="eager").attention
    assert ran is not None
    assert (ran.asked, ran.ran, ran.honoured) == ("eager", "math", True)
    monkeypatch.setattr(
        work,
        "observe",
        lambda asked, step, device: AttentionReport(asked=asked, ran="flash", honoured=False),
    )
    found = cell(precision="fp16", attention="eager")
    assert (found.status, found.reason) == ("unsupported", "asked for eager attention, flash ran")


def test_what_cannot_be_is_skipped_or_refused() -> None:
    assert "scales no loss" in precision.skip(PrecisionAxes(precision="amp-bf16", scale=2.0), "cpu")
    assert "is for CUDA" in precision.skip(PrecisionAxes(attention="xformers"), "cpu")
    done = harness("precision", "precision=fp8", module="harness.probe")
    assert (done.returncode, "unknown value 'fp8'" in done.stderr) == (2, True)


def found(**seen: object) -> Found:
    usual = {"dtype": "float16", "limit": FP16_MAX, "attention": "sdpa", "scale": 1.0, "finite_scale": 1.0}
    return Found(**{"bf16": "native", "narrow": Largest(10.0, "a"), **usual, **seen})  # type: ignore[arg-type]


def test_the_verdict_is_the_worst_of_what_was_found() -> None:
    assert judge(found())[0] == "ok"
    assert judge(found(narrow=Largest(3e4, "a")))[0] == "caveat"
    assert judge(found(zero_gradients=("w",)))[0] == "caveat"
    assert judge(found(backward="b", finite_scale=None))[0] == "nonfinite"
    assert judge(found(forward="f"))[0] == "nonfinite"
    # Eager overflows and compiled code does not: it is what was asked for, and rests on skipped roundings.
    assert judge(found(forward="f", compiled=True))[0] == "caveat"
    assert judge(found(forward="f", compiled=True, compiled_bad="w"))[0] == "nonfinite"
    assert judge(found(compiled=True, compiled_bad="w"))[0] == "nonfinite"
    assert judge(found(compiled=True, fallback="skipped frame")) == (
        "caveat",
        "compiled in part only: skipped frame; " + judge(found())[1],
    )
    assert judge(found(updates=2, skipped=0, after="w"))[0] == "nonfinite"
    assert judge(found(dtype="bfloat16", limit=3.4e38, bf16="emulated (sm_70)"))[0] == "caveat"
    assert (headroom(FP16_MAX / 4, FP16_MAX), headroom(0.0, FP16_MAX)) == (2.0, math.inf)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("attention", "verdict"), [("eager", "nonfinite"), ("efficient", "caveat")])
def test_on_a_gpu_the_outlier_preset_fails_where_scores_are_written_out(attention: str, verdict: str) -> None:
    found = cell(device="cuda", model=OUTLIER, precision="fp16", attention=attention)
    assert found.verdict == verdict, found.verdict_reason


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compiled_code_skips_roundings_too() -> None:
    assert list(casts.demonstrate("cuda").values()) == ["inf", "1000", "inf"]
    major, _ = torch.cuda.get_device_capability()
    assert (bf16.support("cuda")[0] == "native") == (major >= 8)
