"""Numbers of the engine's steps, which let copies wait for the work that writes their pages."""

from dataclasses import dataclass


@dataclass
class Steps:
    """The numbers are drawn from the ids of kvferry requests. For the scheduler's thread alone."""

    #: ``written_through`` of the last step in which the ranks write pages.
    work: int = 0
    #: ``written_through`` of the last step that is known to be over. Only deadlines depend on it.
    over: int = 0
    #: Id of the last store of pages that the step writes that was scheduled with it: it waits for work up to its id.
    store: int = 0
    #: The highest number of earlier work that some store or load waits for.
    awaited: int = 0
