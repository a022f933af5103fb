"""RankModel: the user's model cut down to what one rank holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from fold3d.config import AUTO, BLOCKS, GRAPH, ParallelConfig
from fold3d.device import processes_of_host
from fold3d.errors import ConfigError, TraceError
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.placement.recomputed_blocks import recomputed_blocks
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.plan.strategy import Strategy
from fold3d.sharding.plan import ShardingPlan
from fold3d.stage.loss_run import LossRun
from fold3d.stage.micro_batch import DropoutKey, LossFunction, loss_run
from fold3d.stage.recompute import modules_to_recompute, recompute_modules
from fold3d.stage.split_model import SplitModel
from fold3d.stage.users_state import ModelState
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.install import install
from fold3d.tensor_parallel.operators import BlockOperators
from fold3d.tensor_parallel.vocabulary.chunked_loss import install_chunked_loss
from fold3d.tensor_parallel.vocabulary.install import install_vocabulary
from fold3d.topology import Topology, stage_of
from fold3d.torch_private import follows_operations, try_latest_code_first
from fold3d.trace import Trace, find_blocks, tied_groups, trace
from fold3d.trace.arguments import ancestors
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.compound import holders, move
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.empty import whole_on_each
from fold3d.weights.materialize import materialize
from fold3d.weights.part_marks import refuse_calls, refuse_states, state_of
from fold3d.weights.parts import Parts, shard_parameters
from fold3d.weights.release import is_released, release


def compile_blocks(coat: Coat, model: Module, blocks: Sequence[str], options: Mapping[str, Any]) -> None:
    """Compiles the forwards of `blocks`, of the model where none are known.

    What lies around a block (its hooks, its seed, waiting for its weights, computing it again) runs as it is, and what
    is compiled is the block's own code. Compilation happens when a block first runs, and again for other shapes.

    Args:
        options: of torch.compile.
    """
    # What is computed again must run the code that ran first. By default the code that ran last is tried first, which
    # between a forward and its backward may have become that of another micro-batch's shapes.
    try_latest_code_first(False)
    coat.callback(try_latest_code_first, True)
    for name in blocks or ("",):
        module = model.get_submodule(name)
        coat.put(Wrap.COMPILED, module, _compiled(module.forward, options))


def _compiled(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    compiled = torch.compile(original, **options)

    def forward(*args: Any, **named: Any) -> Any:
        # A mode looks at every operation, such as a recording's: there is nothing to be gained from compiling.
        return (original if follows_operations() else compiled)(*args, **named)

    return forward


logger = logging.getLogger(__name__)


def begin_loss(
    model: Module,
    config: ParallelConfig,
    function: LossFunction,
    inputs: dict[str, Any],
    device: torch.device,
    key: DropoutKey,
    trains: bool,
    *,
    may_cut: bool,
) -> LossRun:
    """Returns the run of a loss function with the first micro-batch, which rests where it calls the model; over, where
    it does not. Raises: whatever `function` raises.

    Args:
        trains: whether a backward will follow.
        may_cut: whether the model may be cut: other runs begin before this one is over.
    """
    try:
        # Which modules a graph is cut between is not known before it is recorded: it is the model that is called.
        blocks = [] if config.partition == GRAPH else find_blocks(model, config.blocks, config.partition)
    except TraceError:  # of which `record` tells, if it matters
        blocks = []
    loss = loss_run(function, model, inputs)
    with torch.set_grad_enabled(trains):
        loss.begin(model, ancestors(blocks), device, key, ModelState(model, may_cut=may_cut))
    return loss


def record(
    model: Module, config: ParallelConfig, example: Mapping[str, Any] | None, segments: int | None
) -> Trace | None:
    """Returns the recording of the model; None for one that cannot be recorded and need not be cut.

    Args:
        segments: None where their number is open.
    Raises: TraceError for a model that must be cut and cannot be.
    """
    try:
        _check_not_compiled(model)
        chunks = config.pp * (segments or 1)
        return trace(model, blocks=config.blocks, partition=config.partition, example=example, chunks=chunks)
    except TraceError as error:
        # Data parallelism alone needs no blocks, unless the user has named them.
        named = config.blocks != AUTO or config.partition != BLOCKS
        if config.pp > 1 or config.tp > 1 or segments not in (1, None) or named:
            raise
        logger.info("the model stays in one piece: %s", error)
        return None


def _blocks_of(model: Module, config: ParallelConfig, recording: Trace | None) -> list[str]:
    """Returns the blocks of a model that is not cut, as far as they are needed and were recorded or can be told without
    running it.

    Raises: TraceError when something is asked for that is done per block.
    """
    try:
        _check_not_compiled(model)
        if config.partition == GRAPH:
            return [] if recording is None else list(recording.modules)
        return find_blocks(model, config.blocks, config.partition)
    except TraceError:
        if config.recomputes:
            raise
        return []


def _check_not_compiled(model: Module) -> None:
    for name, module in model.named_modules():
        # What torch.compile(module) and module.compile() leave behind.
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"module '{name}'" if name else "the model"
            raise TraceError(
                f"{what} is compiled (torch.compile), and fold3d runs the model's modules chunk by chunk and cannot "
                "look into compiled ones; pass the model as it was before torch.compile"
            )


class RankModel:
    """Cuts `model` in place: names and module objects stay, parameters of other ranks lose their storage; of those that
    are spread over a tensor-parallel group this rank's part stays.

    Attributes:
        split: runs one chunk of the model.
        trace: what was recorded on this rank; None where nothing could be.
        layout: which parameters lie where, the same on all ranks; None where nothing was recorded.
        ranges: blocks [first, end) of every chunk.
        parameters: canonical name -> parameter with storage on this rank, in the model's order.
        placement: which stage holds which parameter.
        group: of the ranks that share its weights; who connects the ranks connects it.
        operators: what its blocks have run that was not proved.
        coat: all that is on its modules while this uses it.
        parts: which part of each parameter is this rank's.
        shares: of parameters whose parts overlap: one over the number of ranks that hold an element, fp64, of a shape
            that expands to the parameter's.
    """

    def __init__(
        self,
        model: Module,
        config: ParallelConfig,
        strategy: Strategy,
        topology: Topology,
        device: torch.device,
        recording: Trace | None,
        weights: str | None,
        sharding: ShardingPlan | None = None,
        compile_options: Mapping[str, Any] | None = None,
        layout: Trace | None = None,
    ):
        """Args:
        compile_options: of torch.compile, for each block; None: blocks are not compiled.
        recording: of this rank's micro-batch, or what `record` returned, placed as `layout` says.
        layout: which parameters lie where, the same on all ranks; None: as the recording says.
        sharding: how parameters are spread over tensor-parallel groups; None where there are none.
        """
        self.parts = Parts.whole() if sharding is None else Parts(sharding, topology.tp_rank)
        self.model = model
        on_meta = any(p.device.type == "meta" for p in model.parameters())
        self.trace = recording
        self.layout = recording if layout is None else layout
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.split: SplitModel | WholeModel
        if self.trace is None:
            self.ranges: list[tuple[int, int]] = [(0, 0)]
        else:
            self.ranges = list(strategy.ranges)
        recompute = RECOMPUTE.of(strategy)
        blocks = (
            self.trace.blocks
            if self.trace is not None and strategy.num_chunks > 1
            else _blocks_of(model, config, recording)
        )
        modules = list(dict.fromkeys(blocks))
        inner = modules_to_recompute(model, blocks, self.ranges, recompute)
        again = recomputed_blocks(blocks, self.ranges, strategy.pp, recompute, topology.style)
        placement = ParameterPlacement.of(
            names, self.layout, self.ranges, strategy.pp, tied_groups(model), topology.style
        )
        self.placement = placement.sharded(self.parts.plan)
        self.stage = topology.pp_rank
        keep = self.placement.held_by(self.stage)
        if not on_meta and topology.rank == 0 and (told := whole_on_each(model, topology, processes_of_host())):
            logger.warning("%s", told)
        if on_meta:
            _refuse_cut_model(model, keep)
            shard_parameters(model, self.parts)  # those that have values
            materialize(model, keep, seed=config.seed, folder=weights, parts=self.parts)
        if recording is not None:
            _convert(model, recording)
        release(model, keep)
        if not on_meta:
            shard_parameters(model, self.parts)
        refuse_states(model)
        _move(model, device)
        self._apart: SplitModel | None = None
        self.group = TensorParallelGroup.of(self.parts.plan.tp, topology.tp_rank)
        self.operators = BlockOperators(self.parts.plan)
        self.parameters: dict[str, Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.device.type != "meta"
        }
        self._places = _places(model, {id(one) for one in self.trainable().values()})
        tp_rank = self.parts.rank
        self._primary = frozenset(
            name for name in self.parameters if self.placement.is_responsible(name, self.stage, tp_rank)
        )
        self.shares = {
            name: _one_over(shard.copies(tp_rank), shard.dim, parameter)
            for name, parameter in self.parameters.items()
            if (shard := self.parts.shard_of(name)) is not None and shard.overlaps
        }
        plan = self.parts.plan
        with Coat() as coat:
            coat.callback(refuse_calls, model)  # without it, parts look like the whole
            if plan.tp > 1:
                install(coat, model, plan, self.parts.rank, self.group, self.operators)
                install_vocabulary(coat, model, plan.vocabulary, self.group)
            if config.chunked_loss is not None:
                install_chunked_loss(coat, model, config.chunked_loss, tells=self.parts.rank == 0)
            if compile_options is not None:
                compile_blocks(coat, model, modules, compile_options)
            recompute_modules(coat, model, inner)
            on_top = coat.enter_context(Coat())
            if strategy.num_chunks == 1:
                self.split = WholeModel(model, blocks, recompute=again, coat=on_top)
            else:
                assert self.trace is not None, "what is cut was recorded"
                self.split = SplitModel(
                    model, self.trace, self.ranges, recompute=again, computes_loss=topology.has_loss,
                    is_alone=topology.pp == 1, coat=on_top, not_of_end=self._not_of_end(topology),
                )  # fmt: skip
            self.coat = coat.pop_all()

    def _not_of_end(self, topology: Topology) -> list[str]:
        """Returns the parameters and persistent buffers that another stage saves than that of the last block."""
        end = stage_of(len(self.ranges) - 1, topology.pp, topology.style)
        return [name for name in state_of(self.model) if self.placement.stage_of_module(name) != end]

    def apart(self) -> SplitModel:
        """Returns what runs the blocks apart from what lies behind them."""
        if isinstance(self.split, SplitModel):
            return self.split
        assert self.trace is not None, "what has shards was recorded"
        if self._apart is None:
            everything = [(0, len(self.trace.blocks))]
            self._apart = SplitModel(
                self.model, self.trace, everything, beneath=self.split, coat=self.coat.enter_context(Coat())
            )
        return self._apart

    def replaced(self) -> dict[str, Module]:
        """Returns the modules for which something stands in where another chunk runs them, by name."""
        if self.trace is None or isinstance(self.split, WholeModel):
            return {}
        names = dict.fromkeys((*self.trace.prologue, *self.trace.blocks, *self.trace.between, *self.trace.epilogue))
        modules = {name: self.model.get_submodule(name) for name in names}
        return {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}

    def divided(self) -> dict[str, Module]:
        """Returns the blocks, and the modules in them, that compute with parts of weights, by name."""
        return {
            name: module
            for block in (self.trace.modules if self.trace is not None else ())
            for name, module in self.model.get_submodule(block).named_modules(prefix=block)
            if any(whole_shape(one) != one.shape for one in module.parameters())
        }

    def check_weights(self) -> None:
        """Raises ConfigError where something has put another Parameter, or a module with others, in the place of one
        that is trained: what is there now would compute, and what was there would be summed and stepped."""
        for held, key, one, name in self._places:
            if held.get(key) is not one:
                raise ConfigError(
                    f"'{name}' is another {'Parameter' if isinstance(one, Parameter) else 'module'} than when the "
                    "model was taken over to be trained, and nobody would train it: something has replaced it "
                    "(load_state_dict(assign=True), a new head). Copy the values into the one that was there "
                    "(load_state_dict, or parameter.data.copy_()), or do that before Trainer or Engine is made"
                )

    def trainable(self) -> dict[str, Parameter]:
        """Returns the parameters of this rank that receive gradients."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def primary(self) -> frozenset[str]:
        """Returns the names of the parameters this rank is responsible for, in the norm and when they are saved."""
        return self._primary


def _places(model: Module, parameters: set[int]) -> list[tuple[dict[str, Any], str, object, str]]:
    """Returns where `parameters`, by identity, and the modules on the way to them are: the dictionary, the key in it,
    what is there, and its name."""
    with_some = {id(module) for module in model.modules() if any(id(one) in parameters for one in module.parameters())}
    return [
        (held, key, one, f"{path}.{key}".lstrip("."))
        for path, module in model.named_modules()
        for held, wanted in ((module._modules, with_some), (module._parameters, parameters))
        for key, one in held.items()
        if id(one) in wanted
    ]


def _one_over(counts: list[int], dim: int, parameter: Parameter) -> torch.Tensor:
    """Returns one over `counts`, along dimension `dim` of the parameter."""
    shape = [len(counts) if axis == dim else 1 for axis in range(parameter.ndim)]
    return torch.tensor(counts, dtype=torch.float64, device=parameter.device).reciprocal().view(shape)


def _refuse_cut_model(model: Module, keep: set[str]) -> None:
    """Raises ConfigError when `model` was cut before and needed weights are gone; drawing others would be silent."""
    gone = [name for name, p in model.named_parameters(remove_duplicate=False) if name in keep and is_released(p)]
    if gone:
        raise ConfigError(
            f"the model was cut by another Engine, and this rank needs {len(gone)} weights that only other ranks kept "
            f"({gone[0]}, ...); build the model anew and load the first engine's state_dict()"
        )


def _convert(model: Module, recording: Trace) -> None:
    """Gives parameters the dtype to which the first forward would convert them: sums of gradients and the optimizer
    hold them from before it on."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, dtype in recording.converted:
        if not is_released(parameters[name]):
            parameters[name].data = parameters[name].data.to(dtype)


def _move(model: Module, device: torch.device) -> None:
    """Moves what has storage to `device`; parameters of other ranks stay on meta."""
    for _, module in holders(model):
        move(module, device)
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                if tensor is not None and tensor.device.type != "meta" and tensor.device != device:
                    tensor.data = tensor.data.to(device)
