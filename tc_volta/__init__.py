"""A safe torch.compile for transformers on any GPU, Volta above all, and an attention op that stays in the graph.

    model.set_attn_implementation(tc_volta.attention_name())   # the best kernel that serves, inside the graph
    tc_volta.compile_layers(model)                             # each decoder layer; one graph for all
    print(tc_volta.report(model))                              # what was decided, what compiled, and why

Importing registers the op and changes nothing else.
"""

from tc_volta.choice import Choice, choose, usable
from tc_volta.compiler import compile, compile_layers, compile_mlp_only, decoder_layers
from tc_volta.errors import Unsupported
from tc_volta.kernels import KERNELS, Kernel
from tc_volta.op import flash_attn, flash_attn_backward
from tc_volta.policy import Decision, DeviceFacts, decision, device_facts, policy
from tc_volta.report import Report, report
from tc_volta.request import Request, request_of
from tc_volta.routing import Routing, attention_name, register_flash_attn_volta

__all__ = [
    "KERNELS",
    "Choice",
    "Decision",
    "DeviceFacts",
    "Kernel",
    "Report",
    "Request",
    "Routing",
    "Unsupported",
    "attention_name",
    "choose",
    "compile",
    "compile_layers",
    "compile_mlp_only",
    "decision",
    "decoder_layers",
    "device_facts",
    "flash_attn",
    "flash_attn_backward",
    "policy",
    "register_flash_attn_volta",
    "report",
    "request_of",
    "usable",
]
