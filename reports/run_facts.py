"""What run.json and the rows say about a run as a whole: where, when, how isolated, and what is doubtful."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from reports.load import Run
from reports.points import device_name
from reports.text import count, fact, gib, one_line

_LIBRARIES = ("torch", "triton", "transformers", "xformers")


def facts(run: Run) -> tuple[tuple[str, str], ...]:
    """(what, found) about the run, for its table."""
    meta = run.meta
    when = f"{meta.get('started_at') or 'unknown'} to {meta.get('finished_at') or 'not finished'}"
    found = [("suite", f"{run.name}: {run.title}"), ("when", when), ("cells", _cells(run))]
    used = _environments(run)
    for number, environment in enumerate(used.values(), 1):
        suffix = f" {number}" if len(used) > 1 else ""
        found += [(f"{part}{suffix}", text) for part, text in _environment(environment) if text]
    found += [("isolation", _isolation(run)), ("measure", _measure(run))]
    return tuple((what, one_line(text, 600)) for what, text in found if text)


def _environments(run: Run) -> dict[str, dict[str, Any]]:
    """The environments that rows refer to; all of run.json's where no row refers to one."""
    known = run.meta.get("environments") or {}
    wanted = Counter(row.environment for row in run.rows if row.environment in known)
    return {key: known[key] for key in known if key in wanted} or dict(known)


def _cells(run: Run) -> str:
    counts = Counter(row.status for row in run.rows)
    said = ", ".join(f"{n:,} {status}" for status, n in counts.most_common())
    surprises = sum(not row.expected for row in run.rows)
    tail = f"; {surprises:,} not as the suite expects" if surprises else ""
    of = run.meta.get("cells")
    total = f"{len(run.rows):,} of {of:,}" if isinstance(of, int) and of else f"{len(run.rows):,}"
    return f"{total} ({said}){tail}" if said else total


def _environment(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stack, device = environment.get("stack", {}), environment.get("device", {})
    host, code = environment.get("host", {}), environment.get("code", {})
    yield "device", _device(device)
    yield "libraries", _stack(stack)
    yield "environment", ", ".join(f"{k}={v}" for k, v in (stack.get("env") or {}).items())
    yield "host", _host(host)
    yield "code", _code(code)


def _device(device: Mapping[str, Any]) -> str:
    names = Counter(device.get("names") or ([device["name"]] if device.get("name") else []))
    parts = [", ".join(f"{n} x {name}" if n > 1 else str(name) for name, n in names.items())]
    if device.get("driver"):
        parts.append(f"driver {device['driver']}")
    for key, unit in (("power_limit_w", "W"), ("max_sm_clock_mhz", "MHz at most")):
        values = device.get(key)
        values = values if isinstance(values, list) else [values]
        known = dict.fromkeys(f"{value:g} {unit}" for value in values if isinstance(value, int | float))
        parts += ["/".join(known)] if known else []
    memory = device.get("memory_bytes")
    memory = memory if isinstance(memory, list) else [memory]
    sizes = dict.fromkeys(f"{gib(size)} GiB" for size in memory if isinstance(size, int | float))
    parts += ["/".join(sizes)] if sizes else []
    if device.get("usable") or device.get("cores"):
        parts.append(f"{device.get('usable') or device.get('cores')} usable cores")
    return ", ".join(part for part in parts if part)


def _stack(stack: Mapping[str, Any]) -> str:
    first = [f"{name} {stack[name]}" for name in ("python", *_LIBRARIES) if name in stack]
    others = sorted(k for k in stack if k not in ("python", "env", *_LIBRARIES))
    return ", ".join([*first, *(f"{name} {stack[name]}" for name in others)])


def _host(host: Mapping[str, Any]) -> str:
    memory = host.get("memory_bytes")
    parts = [
        str(host.get("hostname", "")),
        str(host.get("cpu", "")),
        f"{host['cores']} cores" if host.get("cores") else "",
        f"{gib(memory)} GiB" if isinstance(memory, int | float) else "",
        f"kernel {host['kernel']}" if host.get("kernel") else "",
    ]
    return ", ".join(part for part in parts if part)


def _code(code: Mapping[str, Any]) -> str:
    if not code:
        return ""
    revision = str(code.get("git", "unknown"))[:12]
    state = {True: ", with uncommitted changes", False: ", clean"}.get(code.get("dirty"), "")  # type: ignore[arg-type]
    return f"revision {revision}{state}, files {code.get('hash', 'unknown')}"


def _isolation(run: Run) -> str:
    ran = [row.isolation for row in run.rows if row.isolation.method != "none"]
    if not ran:
        return ""
    methods = ", ".join(f"{n:,} by {method}" for method, n in Counter(i.method for i in ran).most_common())
    caches = "/".join(sorted({i.cache for i in ran}))
    strays = sum(i.killed_strays for i in ran)
    parts = [f"a fresh process per cell: {methods}", f"compile caches {caches}"]
    if strays:
        parts.append(f"{count(strays, 'stray process', 'stray processes')} ended")
    if any(i.neighbours for i in ran):
        parts.append(f"{sum(bool(i.neighbours) for i in ran)} cells had neighbours")
    return "; ".join(parts)


def _measure(run: Run) -> str:
    shown = dict.fromkeys(
        ", ".join(f"{key} {fact(value)}" for key, value in row.measure.items()) for row in run.rows
    )
    return " / ".join(text for text in shown if text)


def warnings(run: Run) -> tuple[str, ...]:
    """What makes the whole run doubtful, and what to do about it."""
    return tuple(one_line(text, 600) for text in _warnings(run))


def _warnings(run: Run) -> Iterator[str]:
    meta, used = run.meta, _environments(run)
    if meta.get("interrupted"):
        yield "The run was interrupted; the same command goes on where it stopped."
    elif not meta.get("finished_at"):
        yield "The run has not finished; what follows is what was there."
    yield from (f"{name} is no row and is left out: {why}" for name, why in run.damaged)
    if len(used) > 1:
        parts = ", ".join(_differing(list(used.values())))
        yield f"Its rows come from {len(used)} environments that differ in {parts}: compare with care, or run with --fresh."
    if any(environment.get("code", {}).get("dirty") for environment in used.values()):
        yield "The code had uncommitted changes: the revision alone does not reproduce these figures."
    unknown = {row.environment for row in run.rows} - set(meta.get("environments") or {})
    if unknown - {""}:
        yield "run.json does not describe the environment of some rows."
    spawned = Counter(r.isolation.reason for r in run.rows if r.isolation.reason)
    for reason, n in spawned.items():
        yield f"{count(n, 'cell')} not isolated as asked: {reason}"
    yield from (f"Note: {note}" for note in meta.get("notes") or ())
    if len({device_name(meta, key) for key in used}) > 1:
        yield "More than one kind of device: each has tables of its own."


def _differing(environments: list[dict[str, Any]]) -> list[str]:
    parts = dict.fromkeys(part for environment in environments for part in environment)
    return [part for part in parts if any(e.get(part) != environments[0].get(part) for e in environments)]
