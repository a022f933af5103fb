"""ReadingModules: which modules read a parameter, so that only their forwards wait until it is up to date."""

from __future__ import annotations

from fold3d.trace import Trace


class ReadingModules:
    """Which modules read a parameter, as far as the recording proves it."""

    def __init__(self, trace: Trace | None):
        self._trace = trace
        self._blocks: dict[str, set[int]] = {}
        for k, name in enumerate(trace.blocks if trace else ()):
            self._blocks.setdefault(name, set()).add(k)
        self._outer = {*trace.prologue, *trace.epilogue} if trace else set()
        self._aliases = {name: group for group in trace.tied for name in group} if trace else {}

    def of(self, name: str) -> tuple[str, ...]:
        """Returns the modules whose forwards alone read parameter `name`; none when others may."""
        trace = self._trace
        aliases = self._aliases.get(name, (name,))
        if trace is None or not set(aliases).isdisjoint((*trace.shared, *trace.direct)):
            return ()
        inside = [self._enclosing(alias) for alias in aliases]
        regions = {k for k, used in enumerate(trace.uses) if not set(aliases).isdisjoint(used)}
        allowed: set[int] = set()
        for module in inside:
            if module is None:
                return ()
            allowed |= self._blocks.get(module, {0, len(trace.blocks)})
        return tuple(dict.fromkeys(module for module in inside if module)) if regions <= allowed else ()

    def _enclosing(self, name: str) -> str | None:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((prefix for prefix in prefixes if prefix in self._blocks or prefix in self._outer), None)
