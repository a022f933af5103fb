"""The life of a micro-batch and the life of a gradient, as sequence diagrams."""

from __future__ import annotations

from pathlib import Path

from docs.pictures.sequence import Line, Participant, draw_sequence

MICRO_BATCH = (
    Participant("Trainer", "fold3d/trainer"),
    Participant("Step", "fold3d/engine"),
    Participant("Executor", "csrc/runtime"),
    Participant("model chunk", "fold3d/stage"),
    Participant("model", "the user's"),
    Participant("Communicator", "csrc/comm, own threads", on_training_thread=False),
    Participant("next stage", "another rank", on_training_thread=False),
)
LIFE_OF_A_MICRO_BATCH = (
    Line("Trainer", None, "training_step() keeps the micro-batches of a step until the last one is there"),
    Line("Trainer", "Step", "run(inputs, loss function)"),
    Line("Step", "Executor", "actions of the schedule, micro-batches"),
    Line("Executor", "Communicator", "the receives of the step are queued"),
    Line("Executor", "Communicator", "F: wait for what the chunk before sent", waits=True),
    Line("Executor", "model chunk", "forward(micro-batch, received)"),
    Line("model chunk", "model", "loss function: calls the model's own forward"),
    Line("model", None, "blocks of other chunks are passed over"),
    Line("model", "model chunk", "the last block of the chunk ends the forward"),
    Line("model chunk", "Executor", "what it returned, kept for its backward"),
    Line("Executor", "Communicator", "SEND_F"),
    Line("Communicator", "next stage", "activations, before all gradients' sums"),
    Line("next stage", None, "last chunk: the share of the loss is the result of its forward"),
    Line("next stage", "Communicator", "SEND_B: gradient of what was sent"),
    Line("Executor", "Communicator", "B: wait for it", waits=True),
    Line("Executor", "model", "autograd: the gradients of this chunk's weights"),
    Line("Executor", "Communicator", "SEND_B to the stage before; what was kept is freed"),
    Line("Executor", "Step", "results of the last stage"),
    Line("Step", "Trainer", "the replica's loss, on all its ranks", waits=True),
)
GRADIENT = (
    Participant("Executor", "csrc/runtime"),
    Participant("Reducer", "fold3d/data_parallel"),
    Participant("rings", "csrc/comm, own threads", on_training_thread=False),
    Participant("other replicas", "other ranks", on_training_thread=False),
    Participant("DpSync", "fold3d/data_parallel"),
    Participant("optimizer", "the user's"),
    Participant("layer", "next step's forward"),
)
LIFE_OF_A_GRADIENT = (
    Line("Executor", "Reducer", "autograd has added to a weight's gradient"),
    Line("Reducer", None, "counts; the bucket's last gradient of the last micro-batch has come"),
    Line("Reducer", "rings", "reduce-scatter of the bucket, in one order on all replicas"),
    Line("rings", "other replicas", "slice by slice; each first lets pipeline messages pass"),
    Line("rings", None, "early buckets: all-gather of the sums, in the planned order"),
    Line("Executor", "DpSync", "last backward done"),
    Line("DpSync", "rings", "norm: wait until all sums are here", waits=True),
    Line("DpSync", "other replicas", "one all-reduce: exact global norm", waits=True),
    Line("DpSync", "optimizer", "step(): its settings of now are kept with the clip factor"),
    Line("DpSync", None, "zero1 buckets: the replica steps its own shard"),
    Line("DpSync", "rings", "zero1: all-gather of the parameters; step() returns"),
    Line("layer", "DpSync", "before the layer's first forward: are its weights ready?"),
    Line("DpSync", "rings", "wait for this layer's bucket only", waits=True),
    Line("DpSync", "optimizer", "early buckets: stepped now, with the settings kept"),
    Line("DpSync", "layer", "the layer runs; later layers' buckets are still on the network"),
)


def draw() -> tuple[Path, Path]:
    """Writes both diagrams; returns their paths."""
    return (
        draw_sequence(MICRO_BATCH, LIFE_OF_A_MICRO_BATCH, "life_of_a_micro_batch.png"),
        draw_sequence(GRADIENT, LIFE_OF_A_GRADIENT, "life_of_a_gradient.png"),
    )
