"""What triton-lowering reads from IR, PTX and the assembler's words. No Triton is needed."""

from __future__ import annotations

from probes.triton_lowering import assembly
from probes.triton_lowering.work import judged

TTIR = "%3 = tt.dot %1, %2, %cst, inputPrecision = tf32 : tensor<64x32xf16> * tensor<32x64xf16> -> tensor<64x64xf32>\n"
PTX = """
\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2};
\t@%p1 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2};
\tfma.rn.f32 %f1, %f2, %f3;
\tcvt.rn.bf16x2.f32 %r1, %f1, %f2;
\t// fma.rn.f32 in a comment
"""
LOG = """ptxas info    : Function properties for k
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 392 bytes cmem[0]"""


def test_instructions_are_counted_where_they_are_instructions() -> None:
    kernel = assembly.made(TTIR, PTX)
    assert (kernel.dots, kernel.operands) == (1, ("f16",))
    assert kernel.matrix == {"mma.sync m16n8k16": 2}
    assert (kernel.fma, kernel.bf16) == (1, 1)


def test_registers_and_spills_are_the_assemblers() -> None:
    used = assembly.resources(LOG)
    assert (used.registers, used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (
        168,
        16,
        24,
        8,
    )
    assert assembly.resources("it said nothing").registers is None


def test_a_scalar_dot_is_a_caveat_only_where_the_card_has_an_instruction_for_it() -> None:
    used = assembly.resources(LOG.replace("16 bytes", "0 bytes").replace("24 bytes", "0 bytes"))
    scalar = assembly.made(TTIR, "\tfma.rn.f32 %f1;\n")
    assert judged(scalar, used, 70)[0] == "caveat"
    in_fp32 = assembly.made(TTIR.replace("xf16", "xf32"), "\tfma.rn.f32 %f1;\n")
    assert judged(in_fp32, used, 70) == (
        "ok",
        "scalar FMA: 1 fma, no matrix instruction (sm_70 has none for f32)",
    )
    assert judged(in_fp32, used, 80)[0] == "caveat"


def test_spilled_registers_are_a_caveat_and_so_is_an_assembler_without_words() -> None:
    matrix = assembly.made(TTIR, PTX)
    assert judged(matrix, assembly.resources(LOG), 80)[0] == "caveat"
    verdict, words = judged(matrix, assembly.resources(""), 80)
    assert (verdict, "did not say" in words) == ("caveat", True)


def test_a_refusal_is_in_the_compilers_words_and_not_in_the_ir_that_follows() -> None:
    log = "Unsupported conversion from f16 to f16\nLLVM ERROR: Unsupported rounding mode.\n#blocked = #ttg.blocked\n"
    said = assembly.complaint("RuntimeError: PassManager::run failed", log)
    assert said == (
        "Unsupported conversion from f16 to f16; LLVM ERROR: Unsupported rounding mode.; RuntimeError: PassManager::run failed"
    )
    error = (
        "PTXASError: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
        "ptxas /tmp/x.ptx, line 9; error   : Feature '.bf16' requires .target sm_80 or higher"
    )
    traceback = "    raise RuntimeError(f'Internal Triton PTX codegen error: \\n{log}')\n"
    assert assembly.complaint(error, traceback) == (
        "ptxas Feature '.bf16' requires .target sm_80 or higher; PTXASError: Internal Triton PTX codegen error"
    )
    abort = 'python: /project/lib/ReduceOpToLLVM.cpp:29: virtual Result f(Op, {anonymous}::A) const: Assertion `x && "y"\' failed.\n'
    assert assembly.complaint("", abort) == 'ReduceOpToLLVM.cpp:29: Assertion `x && "y"\' failed'
