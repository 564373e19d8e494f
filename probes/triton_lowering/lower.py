"""One kernel, compiled for one target, in a process of its own: python lower.py SPEC.json FOLDER.

Needs Triton and the standard library alone, so that it runs under any Triton from 3.0 on. What the compiler made lies
in FOLDER (kernel.ttir, .ptx, .cubin, …), with done.json beside it: versions, tools, shared memory; or the error in
the compiler's words. A compiler that aborts takes this process along, and no done.json says so.
"""
# mypy: ignore-errors

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from pathlib import Path


def main(spec_path: str, folder: str) -> int:
    """Compile; 0 when done.json is written, an error in it included."""
    import triton
    from triton.backends.compiler import GPUTarget

    spec = json.loads(Path(spec_path).read_text())
    done = {"triton": triton.__version__, "tools": str(Path(triton.__file__).parent / "backends/nvidia/bin")}
    target = GPUTarget("cuda", spec["target"], 32)
    try:
        made = triton.compile(_source(spec), target=target, options=spec["options"])
        for name, content in made.asm.items():
            path = Path(folder) / f"kernel.{name}"
            path.write_bytes(content) if isinstance(content, bytes) else path.write_text(str(content))
        done |= {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
    except Exception as error:
        traceback.print_exc()
        done["error"] = f"{type(error).__name__}: {error}"
    (Path(folder) / "done.json").write_text(json.dumps(done))
    return 0


def _source(spec):
    """Triton IR as a run's cache keeps it, or a function of a Python file with its argument types."""
    if spec["file"].endswith(".ttir"):
        return spec["file"]
    from triton.compiler import ASTSource

    kernel = _function(Path(spec["file"]), spec["kernel"])
    given = list(zip(kernel.arg_names, spec["arguments"], strict=True))
    constants = {name: one["constant"] for name, one in given if "constant" in one}
    types = {name: one.get("type", "constexpr") for name, one in given}
    aligned = [i for i, (_, one) in enumerate(given) if one.get("aligned")]
    if "constexprs" in inspect.signature(ASTSource.__init__).parameters:  # Triton 3.3 and later
        attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
        return ASTSource(kernel, types, constexprs=constants, attrs=attrs)
    return ASTSource(kernel, _without(types, constants), constants=constants, attrs=_old_attrs(aligned))


def _without(types, constants):
    return {name: kind for name, kind in types.items() if name not in constants}


def _old_attrs(aligned):
    """Triton 3.0 to 3.2: a descriptor class, whose fields changed between them."""
    try:
        from triton.backends.compiler import AttrsDescriptor
    except ImportError:
        from triton.compiler.compiler import AttrsDescriptor
    if hasattr(AttrsDescriptor, "from_dict"):
        held = {"arg_properties": {"tt.divisibility": aligned, "tt.equal_to": []}, "cls": "AttrsDescriptor"}
        return AttrsDescriptor.from_dict(held)
    return AttrsDescriptor(tuple(aligned), ())


def _function(path: Path, name: str):
    sys.path.insert(0, str(path.resolve().parent))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    kernel = getattr(module, name)
    while type(kernel).__name__ in ("Autotuner", "Heuristics"):
        kernel = kernel.fn
    return kernel


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
