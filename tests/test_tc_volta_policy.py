"""Decisions for a device, the one here or one that is not; and which kernel serves which request, and why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tc_volta
from tc_volta import DeviceFacts, Request, choose, decision, policy, usable

V100 = DeviceFacts(kind="cuda", capability=(7, 0), torch="2.10.0", triton="3.6.0", cudnn=91002)
H200 = DeviceFacts(kind="cuda", capability=(9, 0), torch="2.11.0", triton="3.6.0", cudnn=91900)


def value(facts: DeviceFacts, name: str) -> str | bool:
    return decision(policy(facts), name).value


def changed(facts: DeviceFacts, **what: object) -> DeviceFacts:
    return dataclasses.replace(facts, **what)  # type: ignore[arg-type]


def test_every_decision_has_a_reason_and_a_source() -> None:
    for facts in (V100, H200, DeviceFacts(kind="cpu"), changed(V100, cudnn=91300)):
        for one in policy(facts):
            assert one.reason
            assert one.source
        assert len({one.name for one in policy(facts)}) == len(policy(facts))


def test_a_v100_gets_no_cudagraphs_no_triton_gemm_no_bf16_and_expanded_heads() -> None:
    assert value(V100, "cudagraphs") is False
    assert value(V100, "triton_gemm_autotune") is False
    assert decision(policy(V100), "bf16").refuses
    assert value(V100, "expand_kv_heads") is True
    assert value(V100, "use_cache") is False


def test_an_h200_gets_all_of_them() -> None:
    assert value(H200, "cudagraphs") is True
    assert value(H200, "triton_gemm_autotune") is True
    assert not any(one.refuses for one in policy(H200))
    assert value(H200, "expand_kv_heads") is False


def test_decisions_turn_at_the_version_or_card_that_their_source_names() -> None:
    t4 = changed(V100, capability=(7, 5))
    assert value(changed(t4, triton="3.2.0"), "triton_gemm_autotune") is True
    assert value(changed(t4, triton="3.3.1"), "triton_gemm_autotune") is False
    assert "gave zeros" in decision(policy(changed(V100, triton="3.2.0")), "triton_gemm_autotune").reason
    assert value(changed(V100, torch="2.13.0"), "expand_kv_heads") is True
    assert value(changed(V100, torch="2.14.0"), "expand_kv_heads") is False
    assert decision(policy(changed(V100, capability=(7, 5))), "bf16").refuses
    assert not decision(policy(changed(V100, capability=(8, 0))), "bf16").refuses
    assert value(changed(V100, capability=(7, 5)), "cudagraphs") is True


def test_a_cudnn_too_new_for_the_card_is_warned_of_and_only_there() -> None:
    names = [one.name for one in policy(V100)]
    assert "cudnn_version" not in names
    assert value(changed(V100, cudnn=91100), "cudnn_version") == "9.11"
    assert "cudnn_version" not in [one.name for one in policy(changed(H200, cudnn=92400))]


def test_without_triton_there_is_no_triton_gemm() -> None:
    assert value(changed(H200, triton=""), "triton_gemm_autotune") is False


def test_this_machines_facts_are_read() -> None:
    facts = tc_volta.device_facts("cpu")
    assert facts.kind == "cpu"
    assert torch.__version__.startswith(facts.torch)
    assert [one.name for one in policy("cpu")] == [one.name for one in policy(facts)]
    with pytest.raises(KeyError, match="no decision 'tea'; there are use_cache"):
        decision(policy("cpu"), "tea")


# ---- kernels --------------------------------------------------------------------------------------------------


def request(capability: tuple[int, int] = (7, 0), device: str = "cuda", **more: object) -> Request:
    base = {"dtype": torch.float16, "heads": 12, "kv_heads": 2, "head_dim": 128, "seq_q": 1024, "seq_k": 1024}
    return Request(device=device, capability=capability, **{"causal": True, **base, **more})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _as_if_xformers_were_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from tc_volta import kernel_cutlass

    monkeypatch.setattr(kernel_cutlass, "_xformers_missing", lambda: "")


@pytest.mark.parametrize(
    ("asked", "kernels"),
    [
        (request(), ["efficient", "xformers", "math"]),
        (request(dtype=torch.float32), ["efficient", "xformers", "math"]),
        (request(dtype=torch.bfloat16), ["math"]),
        (request(dtype=torch.float64), ["math"]),
        (request(head_dim=100), ["math"]),
        (request(masked=True), ["efficient", "xformers", "math"]),
        (request((9, 0)), ["flash", "cudnn", "efficient", "xformers", "math"]),
        (
            request((9, 0), dtype=torch.bfloat16, window=64),
            ["flash", "cudnn", "efficient", "xformers", "math"],
        ),
        (request((9, 0), dtype=torch.float32), ["efficient", "xformers", "math"]),
        (request((9, 0), masked=True), ["cudnn", "efficient", "xformers", "math"]),
        (request((9, 0), head_dim=256), ["flash", "efficient", "xformers", "math"]),
        (request((8, 6), head_dim=224), ["efficient", "xformers", "math"]),
        (request((9, 0), seq_q=1, causal=False), ["flash", "efficient", "xformers", "math"]),
        (request((0, 0), "cpu"), ["flash", "math"]),
        (request((0, 0), "mps"), ["math"]),
    ],
    ids=repr,
)
def test_each_request_has_its_kernels_and_auto_takes_the_first(asked: Request, kernels: list[str]) -> None:
    reasons = usable(asked)
    assert [name for name, why in reasons.items() if not why] == kernels
    kernel, reason = choose(asked)
    assert kernel == kernels[0]
    for name in list(reasons)[: list(reasons).index(kernel)]:
        assert f"not {name}: {reasons[name]}" in reason


def test_reasons_name_the_number_that_rules_a_kernel_out() -> None:
    reasons = usable(request(dtype=torch.bfloat16))
    assert reasons["flash"] == "FlashAttention needs sm_80; this is sm_70"
    assert reasons["efficient"] == "bfloat16 needs sm_80; this is sm_70"
    assert usable(request(head_dim=100))["efficient"] == "head_dim 100 is no multiple of 8"
    assert "head_dim 256" in usable(request((9, 0), head_dim=256))["cudnn"]


def test_a_kernel_asked_for_is_taken_or_refused() -> None:
    assert choose(request(), "efficient") == ("efficient", "asked for")
    with pytest.raises(ValueError, match="kernel 'flash' cannot serve this call: .*sm_80; this is sm_70"):
        choose(request(), "flash")
    with pytest.raises(ValueError, match="unknown kernel 'fast'; there are auto, flash, cudnn"):
        choose(request(), "fast")


def test_a_choice_can_be_asked_for_with_the_tensors_themselves() -> None:
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64)
    asked = tc_volta.request_of(q, k, None, True, 0)
    assert (asked.heads, asked.kv_heads, asked.grouped) == (4, 2, True)
    assert choose(asked) == ("flash", "the fastest here")
