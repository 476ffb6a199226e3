"""The message from rank 0 to every rank in each step that runs a batch. TensorRT-LLM pickles and broadcasts it."""

from dataclasses import dataclass, field


@dataclass
class StepMetadata:
    """What every rank needs to know of a step."""

    #: Number of this step, drawn from the ids of kvferry requests after those of its stores; that of an earlier step if
    #: this one runs no forward pass. Stores with a lower id read pages that the step, or an earlier one, writes.
    written_through: int = 0
    #: The highest number up to which stores and loads wait for the work of earlier steps; and the highest of all.
    needed_before: int = 0
    needed_through: int = 0
    #: The stores that were requested with this step: requests of the engine and ids of kvferry requests.
    stores: list[tuple[int, int]] = field(default_factory=list)
    #: Ids of stores of earlier steps that are over on every rank, as the leader has reported.
    over: list[int] = field(default_factory=list)
