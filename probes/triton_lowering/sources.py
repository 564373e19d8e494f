"""Where kernels come from: the built-in file, a Python file, or the Triton cache of a run. Reads; executes nothing.

A kernel's name is `file.py::function` (or the built-in name alone), or the path of a `.ttir` file as Triton keeps it
in its cache: that one carries its types, constants and alignment already, and its launch options lie beside it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from pathlib import Path

import msgspec

BUILTIN = Path(__file__).with_name("builtin.py")
OWN = "own"  # the dtype, or size, of a kernel whose signature names its own
_OPTIONS = ("num_warps", "num_stages")
_TYPE = re.compile(r"\*?(?:fp(?:16|32|64)|bf16|fp8e\w+|[iu](?:1|8|16|32|64))")
_HINT = (
    "write a type (*fp16, *fp16:16, i32, fp32) or a constant, one per argument, e.g. '*fp16:16, i32, 1024'"
)


class Argument(msgspec.Struct, frozen=True, omit_defaults=True):
    """One argument of a kernel: a type, or a constant."""

    type: str | msgspec.UnsetType = msgspec.UNSET
    constant: int | float | bool | msgspec.UnsetType = msgspec.UNSET
    aligned: bool = False


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel and how it is called. `signature` is empty for Triton IR, which has its own."""

    file: Path
    name: str
    signature: str = ""
    options: dict[str, int] = {}

    @property
    def called(self) -> str:
        """The name that `find` takes."""
        if self.file.suffix == ".ttir":
            return str(self.file)
        return self.name if self.file == BUILTIN else f"{self.file}::{self.name}"

    def leaves_open(self, word: str) -> bool:
        """Whether the signature leaves this axis ("dtype" or "size") to the cell."""
        return f"{{{word}}}" in self.signature


def builtin_names() -> list[str]:
    """The built-in set, in the order of its file."""
    return list(_signatures(BUILTIN))


def find(name: str) -> Kernel:
    """The kernel of this name. Raises ValueError that says what is there instead."""
    if name.endswith(".ttir"):
        return _captured(Path(name))
    file, colons, function = name.partition("::")
    if not colons:
        known = builtin_names()
        if name not in known:
            raise ValueError(
                f"unknown kernel {name!r}; built in: {', '.join(known)}; or FILE.py::NAME, or a .ttir file"
            )
        file, function = str(BUILTIN), name
    known_here = _signatures(Path(file))
    if function not in known_here:
        raise ValueError(f"{file}: SIGNATURES has no {function!r}; it has: {', '.join(known_here)}")
    return _kernel(Path(file), function, known_here[function])


def listed(path: Path) -> list[Kernel]:
    """Every kernel in a Python file with SIGNATURES, or in a folder that is a Triton cache. Raises ValueError."""
    if path.is_dir():
        found = sorted(path.rglob("*.ttir"))
        if not found:
            raise ValueError(
                f"{path}: no .ttir file in it; give the Triton cache of a run (TRITON_CACHE_DIR={path} python train.py)"
            )
        return [_captured(one) for one in found]
    if path.suffix == ".ttir":
        return [_captured(path)]
    return [_kernel(path, name, text) for name, text in _signatures(path).items()]


def without_signature(path: Path) -> list[str]:
    """Functions marked `triton.jit` in a Python file for which SIGNATURES has no line."""
    if path.suffix != ".py":
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    jitted = [
        n.name for n in tree.body if isinstance(n, ast.FunctionDef) and any(map(_jits, n.decorator_list))
    ]
    return [name for name in jitted if name not in _signatures(path)]


def arguments(kernel: Kernel, dtype: str, size: int) -> list[Argument]:
    """The arguments, with the open dtype and size filled in. Raises ValueError for a word that is neither."""
    text = kernel.signature.replace("{dtype}", dtype).replace("{size}", str(size))
    return [_argument(word.strip(), kernel) for word in text.split(",")]


def _argument(word: str, kernel: Kernel) -> Argument:
    kind, _, hint = word.partition(":")
    if _TYPE.fullmatch(kind) and hint in ("", "16"):
        return Argument(type=kind, aligned=hint == "16")
    if word in ("True", "False"):
        return Argument(constant=word == "True")
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return Argument(constant=number(word))
    raise ValueError(f"{kernel.file}: SIGNATURES[{kernel.name!r}]: {word!r}: {_HINT}")


def _kernel(file: Path, name: str, text: str) -> Kernel:
    signature, _, launch = text.partition(";")
    options = {}
    for item in filter(None, (part.strip() for part in launch.split(","))):
        key, _, value = item.partition("=")
        if key.strip() not in _OPTIONS or not value.strip().isdigit():
            allowed = ", ".join(f"{option}=N" for option in _OPTIONS)
            raise ValueError(f"{file}: SIGNATURES[{name!r}]: {item!r}: after ';' allowed is {allowed}")
        options[key.strip()] = int(value)
    return Kernel(file=file, name=name, signature=signature.strip(), options=options)


def _captured(path: Path) -> Kernel:
    beside = path.with_suffix(".json")
    try:
        held = json.loads(beside.read_text(encoding="utf-8"))
        options = {key: int(held[key]) for key in _OPTIONS if held.get(key)}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{beside}: cannot be read ({error}); Triton writes it beside the IR, with the launch options"
        ) from error
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return Kernel(file=path, name=path.stem, options=options)


def _signatures(path: Path) -> dict[str, str]:
    """The literal SIGNATURES of a Python file, read without executing it. Raises ValueError."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "SIGNATURES" for t in node.targets):
            return _literal(node.value, path)
    raise ValueError(
        f"{path}: names no SIGNATURES. Add, for each kernel to lower: SIGNATURES = {{'kernel': '…'}}; {_HINT}"
    )


def _literal(node: ast.expr, path: Path) -> dict[str, str]:
    try:
        held = msgspec.convert(ast.literal_eval(node), dict[str, str])
    except (ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: SIGNATURES must be a literal dict of strings: {error}") from error
    if not held:
        raise ValueError(f"{path}: SIGNATURES is empty")
    return held


def _jits(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).split("(")[0] in ("triton.jit", "jit")
