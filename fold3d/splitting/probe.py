"""Probe: runs a block with stubs in the place of its matrix products, with NaN somewhere, and says where it arrives;
Atom: runs of channels that reach the same.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from fold3d.sharding.shard import Shard
from fold3d.sharding.split import Path
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.sites import Site, SiteMode
from fold3d.splitting.torch_modes import Again, DoubleMode, WithoutDraws
from fold3d.tensor_parallel.slices import paths_of, replace_argument

Places = Sequence[int] | Tensor
"""Indices, each once."""
_SMALL = 1 << 16
"""Elements of a parameter that has values whatever it is used for."""


@dataclass(frozen=True, slots=True)
class Poison:
    """Where NaN is put: output channels of a site, indices along a dimension of a parameter, or of an argument."""

    places: Places
    site: str | None = None
    parameter: str | None = None
    argument: Path | None = None
    dim: int = 0
    every: frozenset[str] = frozenset()
    """Sites all of whose output channels are NaN, too."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a run shows: of each site's input which channels are NaN, and which results that somebody reads."""

    sinks: Mapping[str, Tensor]
    leaks: frozenset[Path]

    def same(self, other: Response) -> bool:
        """Returns whether both show the same."""
        return (
            self.leaks == other.leaks
            and self.sinks.keys() == other.sinks.keys()
            and all(torch.equal(mask, other.sinks[name]) for name, mask in self.sinks.items())
        )


@dataclass(slots=True)
class Local:
    """What a run computes as one rank: parts of the sites' outputs, of parameters and of arguments."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Site -> indices of its output channels."""
    shards: dict[str, Shard] = field(default_factory=dict)
    rank: int = 0


class Probe:
    """A private copy of a block in double precision, without weights that matrix products read.

    `sites` are the products that a run makes, by the name of the parameter, in their order; `in_two_ways` are those
    whose parameter is also multiplied otherwise, such as transposed.
    """

    def __init__(self, call: CapturedCall) -> None:
        self.block = copy.deepcopy(call.block)
        self.args, self.kwargs = tree_map_only(Tensor, _double, (call.args, call.kwargs))
        self.read = call.read
        self.sites: dict[str, Site] = {}
        self.in_two_ways: set[str] = set()
        self.seen: dict[str, list[Tensor]] = {}
        self.output: Any = None
        self._presets: dict[Any, Tensor] = {}
        self._again = Again()
        self._reusing = False
        self._handed: dict[tuple[str, int], Tensor] = {}
        self._poison: Poison | None = None
        self._local: Local | None = None
        self._counts: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}
        self._fill()

    def respond(self, poison: Poison) -> Response:
        """Runs with NaN at `poison`. Raises: whatever the block raises."""
        self._poison = poison
        args, kwargs = self.args, self.kwargs
        parameter = None
        try:
            if poison.argument is not None:
                args, kwargs = replace_argument(args, kwargs, poison.argument, lambda x: _poisoned(x, poison))
            if poison.parameter is not None:
                parameter = self.block.get_parameter(poison.parameter)
                parameter.data = _poisoned(self._values[poison.parameter], poison)
            # Fused kernels of attention swallow NaN; the one made of plain operations hands it on.
            with sdpa_kernel(SDPBackend.MATH), self._reused(() if parameter is None else (parameter,)):
                output = self._run(args, kwargs)
        finally:
            self._poison = None
            if parameter is not None and poison.parameter is not None:
                parameter.data = self._values[poison.parameter]
        sinks = {}
        for name, inputs in self.seen.items():
            mask = torch.zeros(self.sites[name].inputs, dtype=torch.bool)
            for x in inputs:
                if x.is_floating_point() and x.numel():
                    mask |= x.reshape(-1, mask.numel()).amax(0).isnan()  # of several numbers NaN is the largest
            if mask.any():
                sinks[name] = mask
        leaks = frozenset(
            path
            for path, leaf in paths_of(output)
            if path in self.read and leaf.is_floating_point() and bool(torch.isnan(leaf).any())
        )
        return Response(sinks, leaks)

    def run(self) -> dict[str, list[Tensor]]:
        """Runs, and returns what each site's input was; the result is in `output`."""
        self._run(self.args, self.kwargs)
        return self.seen

    def run_otherwise(
        self, args: Any = None, kwargs: Any = None, local: Local | None = None
    ) -> dict[str, list[Tensor]]:
        """Does what `run` does, with other arguments, as one rank, or with other numbers in the block's attributes.

        What is computed from the same as in an earlier run is not computed again, and is the same object.
        """
        self._local = local
        parts = {}
        if local is not None:
            for name, shard in local.shards.items():
                parts[self.block.get_parameter(name)] = name, self._part(name, shard, local.rank)
        try:
            with self._reused(parts):
                for parameter, (_, part) in parts.items():
                    parameter.data = part
                self._run(self.args if args is None else args, self.kwargs if kwargs is None else kwargs)
        finally:
            self._local = None
            for parameter, (name, _) in parts.items():
                parameter.data = self._values[name]
        return self.seen

    @contextlib.contextmanager
    def _reused(self, changed: Iterable[nn.Parameter]) -> Iterator[None]:
        """Whatever of a block is behind neither `changed` nor anything else that is new is the same each time."""
        self._reusing = True
        try:
            with self._again, self._again.without(changed):
                yield
        finally:
            self._reusing = False

    def run_in_training(self, draws: bool) -> dict[str, list[Tensor]]:
        """Does what `run` does, as in training.

        Args:
            draws: whether it draws random numbers; otherwise dropout drops nothing, see WithoutDraws.
        """
        self.block.train()
        try:
            with contextlib.nullcontext() if draws else WithoutDraws():
                return self.run()
        finally:
            self.block.eval()

    @property
    def free(self) -> list[str]:
        """Parameters that no matrix product reads."""
        used = {name for site in self.sites.values() for name in (site.weight, site.bias)}
        return [name for name in self._values if name not in used]

    def reached_by(self, parameter: str) -> set[str]:
        """Returns the sites whose inputs depend on a parameter that no product reads."""
        size = self.shape_of(parameter)[0]
        return set(self.respond(Poison(range(size), parameter=parameter)).sinks)

    def shape_of(self, parameter: str) -> torch.Size:
        """Returns a parameter's shape."""
        return self._values[parameter].shape

    # -- runs --

    def _run(self, args: Any, kwargs: Any) -> Any:
        self.seen, self._counts = {}, {}
        with torch.no_grad(), DoubleMode(), SiteMode(self.block.named_parameters(), self._product):
            self.output = self.block(*args, **kwargs)
        return self.output

    def _product(self, site: Site, x: Tensor, shape: list[int]) -> Tensor:
        name = site.weight
        count = self._counts[name] = self._counts.get(name, -1) + 1
        if self._local is None and self.sites.setdefault(name, site).way != site.way:
            self.in_two_ways.add(name)
        if name in self.in_two_ways:
            return self._preset((name, count), shape, x.dtype).clone()
        self.seen.setdefault(name, []).append(x.detach())
        value = self._preset((name, count), [*shape[:-1], self.sites[name].outputs], x.dtype)
        poison, local = self._poison, self._local
        if poison is not None and poison.site == name:
            return value.masked_fill(_mask(poison.places, value.shape[-1]), float("nan"))
        if poison is not None and name in poison.every:
            return torch.full_like(value, float("nan"))
        if local is not None and name in local.outputs:
            return value.index_select(-1, local.outputs[name])
        if not self._reusing:
            return value.clone()  # models add in place
        handed = self._handed.get((name, count))
        if handed is None or handed.shape != value.shape or not self._again.is_unwritten(handed):
            handed = self._handed[name, count] = value.clone()
            self._again.know([handed])
        return handed

    def _preset(self, product: tuple[str, int], shape: list[int], dtype: torch.dtype) -> Tensor:
        """Returns random numbers, the same whenever the product comes."""
        key = (product, tuple(shape))
        if key not in self._presets:
            draw = torch.Generator().manual_seed(len(self._presets) + 11)
            self._presets[key] = torch.randn(shape, dtype=dtype, generator=draw)
        return self._presets[key]

    # -- parameters --

    def _fill(self) -> None:
        """Gives parameters values; first those of matrix products are told from others by a run without any."""
        for name, parameter in list(self.block.named_parameters()):
            self._set(name, _blank(parameter) if parameter.numel() > _SMALL else _random(name, parameter))
        for module in self.block.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = _double(buffer)
        self._run(self.args, self.kwargs)
        matrices = {site.weight for site in self.sites.values()}
        for name, value in list(self._values.items()):
            blank = name in matrices
            if blank or value.numel() > _SMALL:
                self._set(name, _blank(value) if blank else _random(name, value))
        arguments = (leaf for _, leaf in paths_of((self.args, self.kwargs)))
        self._again.know([*self.block.parameters(), *self.block.buffers(), *arguments])

    def _set(self, name: str, value: Tensor) -> None:
        replace_parameter(self.block, name, nn.Parameter(value, requires_grad=False))
        self._values[name] = value

    def _part(self, name: str, shard: Shard, rank: int) -> Tensor:
        whole = self._values[name]
        blank = any(site.weight == name for site in self.sites.values())
        return _blank(whole, shard.shape(whole.shape, rank)) if blank else shard.take(whole, rank)


def replace_parameter(block: nn.Module, name: str, by: nn.Parameter) -> None:
    """Puts another parameter in the place of one, in all modules that hold it."""
    before = block.get_parameter(name)
    for each, parameter in list(block.named_parameters(remove_duplicate=False)):
        if parameter is before:
            holder, _, attribute = each.rpartition(".")
            setattr(block.get_submodule(holder), attribute, by)


def _blank(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Returns zeros of a shape that take no memory."""
    return torch.zeros(1, dtype=torch.float64).expand(like.shape if shape is None else shape)


def _random(name: str, like: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    return 1 + 0.2 * torch.randn(like.shape, dtype=torch.float64, generator=draw)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _poisoned(x: Tensor, poison: Poison) -> Tensor:
    if not x.dim():
        return torch.full_like(x, float("nan"))
    mask = _mask(poison.places, x.shape[poison.dim])
    return x.masked_fill(mask.view(-1, *[1] * (x.dim() - 1 - poison.dim % x.dim())), float("nan"))


def _mask(places: Places, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[slice(places.start, places.stop) if isinstance(places, range) else torch.as_tensor(places)] = True
    return mask


Respond = Callable[[Places], Response]
"""What NaN in some channels reaches."""

_WINDOW = 4096
_PATIENCE = 8
"""Places in a row from which no channels could be told apart, before that is given up."""


@dataclass(frozen=True, slots=True)
class Atom:
    """Channels [first, end) of which the first reaches what all of them together reach."""

    first: int
    end: int
    sinks: dict[str, Tensor]
    """Site -> indices of the channels of its input, ascending."""
    leaks: frozenset[Path]


def atoms(respond: Respond, size: int) -> list[Atom]:
    """Returns the channels [0, size) as atoms, in order.

    Channels that go together (of a head's queries) are found by extending a run as long as it reaches nothing new. Runs
    of that length behind it that each reach something of their own (heads; neurons, which are runs of one) are told
    apart all at once by the bits of words: the block is run once for each bit.
    """
    return list(_AtomSearch(respond, size).walk())


class _AtomSearch:
    def __init__(self, respond: Respond, size: int) -> None:
        self._respond = respond
        self._size = size
        self._lengths: list[int] = []  # of runs found, the latest first
        self._windows: dict[int, list[int]] = {}  # of runs of that length
        self._failures: dict[int, int] = {}

    def walk(self) -> Iterator[Atom]:
        everything = self._respond(range(self._size))
        if not everything.sinks:
            yield _atom(0, self._size, everything)
            return
        position = 0
        while position < self._size:
            single = self._respond([position])
            length = self._run_length(position, single)
            found = self._alike(position, length) or [_atom(position, position + length, single)]
            yield from found
            position = found[-1].end

    def _run_length(self, first: int, single: Response) -> int:
        """Returns how many channels from `first` reach nothing but what the first one reaches."""
        rest = self._size - first
        for length in (rest, *self._lengths):
            if 1 < length <= rest and self._respond(range(first, first + length)).same(single):
                self._remember(self._lengths, length)
                return length
        if self._lengths and self._lengths[0] == 1:
            return 1
        low, high = 1, rest  # `low` is long enough, `high` too long
        while high - low > 1:
            middle = min(2 * low, (low + high) // 2)
            if self._respond(range(first, first + middle)).same(single):
                low = middle
            else:
                high = middle
        self._remember(self._lengths, low)
        return low

    def _alike(self, first: int, length: int) -> list[Atom]:
        """Returns runs of a length from `first` on that each reach something of their own, as far as they can be told
        apart."""
        if self._failures.get(length, 0) == _PATIENCE:
            return []
        rest = (self._size - first) // length
        known = self._windows.setdefault(length, [])
        sizes = [*known, rest]
        window = min(_WINDOW, rest)
        while window > 1 and (length > 1 or not known):
            sizes.append(window)
            window //= 2
        for window in dict.fromkeys(size for size in sizes if 1 < size <= rest):
            found = self._by_words(first, length, window)
            if found:
                self._remember(known, window)
                self._failures[length] = 0
                return found
        self._failures[length] = self._failures.get(length, 0) + 1
        return []

    def _by_words(self, first: int, length: int, window: int) -> list[Atom]:
        """Returns `window` runs if nothing is reached by several of them, or as many of these as are atoms.

        Each has a word of as many bits as the others' words. A place has the bits of the words of the runs that reach
        it: if one does, its word, and if several do, more bits.
        """
        words = _words(window)
        runs = torch.arange(first, first + window * length).view(window, length)
        weight, top = int(words[0]).bit_count(), int(words[0]).bit_length() - 1
        codes: dict[str, Tensor] = {}
        bits: dict[str, Tensor] = {}
        for bit in range(top, -1, -1):
            having = (words >> bit & 1).bool()
            response = self._respond(runs[having].flatten())
            if response.leaks:
                return []
            for name, reached in response.sinks.items():
                codes[name] = codes.get(name, torch.zeros(len(reached), dtype=torch.long)) + (reached.long() << bit)
                bits[name] = bits.get(name, torch.zeros(len(reached), dtype=torch.long)) + reached
            if any(bool((seen > weight).any()) for seen in bits.values()):
                return []
            if bit == top:  # runs that are far apart are the likeliest to reach the same
                others = self._respond(runs[~having].flatten())
                if any(bool((at & bits[name].bool()).any()) for name, at in others.sinks.items() if name in bits):
                    return []
        places: list[dict[str, Tensor]] = [{} for _ in range(window)]
        ascending = words.flip(0)
        for name, code in codes.items():
            here = code.nonzero().flatten()
            if bool((bits[name][here] != weight).any()):
                return []
            run = window - 1 - torch.searchsorted(ascending, code[here])
            order = torch.argsort(run, stable=True)
            values, counts = torch.unique_consecutive(run[order], return_counts=True)
            for value, indices in zip(values.tolist(), torch.split(here[order], counts.tolist()), strict=True):
                places[value][name] = indices
        count = window if length == 1 else self._led(first, length, places)
        if count < 2:
            return []
        return [
            Atom(first + k * length, first + (k + 1) * length, sinks, frozenset())
            for k, sinks in enumerate(places[:count])
        ]

    def _led(self, first: int, length: int, places: list[dict[str, Tensor]]) -> int:
        """Returns how many of the runs, from the first one on, reach all that they reach with their first channels."""
        sinks = self._respond(torch.arange(first, first + len(places) * length, length)).sinks
        for k, reached in enumerate(places):
            if any(name not in sinks or not bool(sinks[name][at].all()) for name, at in reached.items()):
                return k
        return len(places)

    @staticmethod
    def _remember(known: list[int], value: int) -> None:
        if value in known:
            known.remove(value)
        known.insert(0, value)
        del known[4:]


def _words(count: int) -> Tensor:
    """Returns so many different whole numbers, the largest first, all with as many bits set, and few of those."""
    length = next(length for length in itertools.count(1) if math.comb(length, length // 2) >= count)
    chosen = itertools.combinations(range(length - 1, -1, -1), length // 2)
    return (1 << torch.tensor(list(itertools.islice(chosen, count)))).sum(1)


def _atom(first: int, end: int, response: Response) -> Atom:
    sinks = {name: mask.nonzero().flatten() for name, mask in response.sinks.items()}
    return Atom(first, end, sinks, response.leaks)
