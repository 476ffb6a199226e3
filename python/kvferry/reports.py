"""What a rank owes its scheduler's side after a step, and its worker: nothing of it may get lost or be said twice.

What was said stays until the next step begins, so that it can be asked for again after a fault in between.
"""

from collections.abc import Iterable

from kvferry.steps import RankReport, StepMetadata

#: Requests of which it is remembered that they were reported, 0.1 KB each: 2 MB. More cannot be open at a time.
REPORTED_MAX = 16_384


class Reports:
    """See the module. For the thread of the forward pass."""

    def __init__(self) -> None:
        self._steps: list[StepMetadata] = []
        self._told = False
        self._to_abandon: dict[int, None] = {}
        self._over: dict[int, None] = {}
        self._over_told = False
        #: Requests that were reported to be over, the newest last.
        self._reported: dict[int, None] = {}
        self._fault_told = False
        #: The last step whose end was reported: before this step began, and with this step.
        self._stepped = self._stepped_now = 0

    def begin(self, step: StepMetadata) -> None:
        """A step begins. The same one again changes nothing."""
        if any(known is step for known in self._steps):
            return
        if self._told:
            self._steps.clear()
            self._told = False
        if self._over_told:
            self._reported.update(self._over)
            self._over.clear()
            self._over_told = False
            self._stepped = self._stepped_now
            while len(self._reported) > REPORTED_MAX:
                self._reported.pop(next(iter(self._reported)))
        self._steps.append(step)
        self._to_abandon.update(dict.fromkeys(step.abandon))

    def loaded(self) -> set[str]:
        """Engine requests whose loads are over. Nothing once :meth:`failed_pages` was asked, the last of a step."""
        return set() if self._told else {request for step in self._steps for request in step.loaded}

    def failed(self) -> set[str]:
        """Those whose pages are all to be computed. Nothing once :meth:`failed_pages` was asked."""
        return set() if self._told else {request for step in self._steps for request in step.failed}

    def failed_pages(self) -> set[int]:
        """Pages of those that must be computed."""
        self._told = True
        return {page for step in self._steps for page in step.failed_pages}

    def to_abandon(self) -> list[int]:
        """Requests whose pages are to be taken back; the same until :meth:`handed_over`."""
        return list(self._to_abandon)

    def handed_over(self) -> None:
        """The worker's session has them."""
        self._to_abandon.clear()

    def are_over(self, requests: Iterable[int]) -> None:
        """Nothing is copied for these any more."""
        self._over.update(dict.fromkeys(request for request in requests if request not in self._reported))

    def report(self, fault: str) -> RankReport | None:
        """What the scheduler's side is told; None when that is nothing."""
        self._over_told = True
        told, self._fault_told = self._fault_told, bool(fault)
        self._stepped_now = max((step.written_through for step in self._steps), default=self._stepped)
        stepped = self._stepped_now if self._stepped_now > self._stepped else 0
        if not self._over and not stepped and (told or not fault):
            return None
        return RankReport(dict.fromkeys(self._over, 1), fault, stepped)
