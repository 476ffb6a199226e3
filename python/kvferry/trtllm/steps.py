"""Numbers of the engine's steps, which let copies wait for the work that writes their pages."""

from dataclasses import dataclass


@dataclass
class Steps:
    """The numbers are drawn from the ids of kvferry requests. For the executor's thread alone."""

    #: ``written_through`` of the last step that runs a forward pass.
    work: int = 0
    #: Id of the last store of pages that a step writes: it waits for work up to its id.
    store: int = 0
    #: The highest number of earlier work that some load waits for.
    awaited: int = 0
