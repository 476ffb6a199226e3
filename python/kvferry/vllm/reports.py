"""Reports that a rank owes the scheduler's side and its worker. None may be lost or delivered twice.

A report is kept until the next step begins, so that it can be read again after a fault in between.
"""

from collections.abc import Iterable, Mapping

from kvferry.vllm.metadata import RankReport, StepMetadata

#: Most reported requests that are remembered, 0.1 KB each: 2 MB. More cannot be open at a time.
REPORTED_MAX = 16_384


class Reports:
    """The reports of one rank. For the thread of the forward pass."""

    def __init__(self) -> None:
        self._steps: list[StepMetadata] = []
        self._steps_reported = False
        self._to_abandon: dict[int, None] = {}
        self._over: dict[int, None] = {}
        self._over_reported = False
        #: Checksums of this rank, by request id.
        self._checksums: dict[int, dict[int, tuple[int, bytes | None]]] = {}
        #: Requests that were reported as over, the newest last.
        self._reported: dict[int, None] = {}
        self._fault_reported = False
        #: The last reported step: before this step began, and with this step's report.
        self._stepped = self._stepped_now = 0

    def begin(self, step: StepMetadata) -> None:
        """Begins a step. A repeated call for the same step changes nothing."""
        if any(known is step for known in self._steps):
            return
        if self._steps_reported:
            self._steps.clear()
            self._steps_reported = False
        if self._over_reported:
            self._reported.update(self._over)
            self._over.clear()
            self._checksums.clear()
            self._over_reported = False
            self._stepped = self._stepped_now
            while len(self._reported) > REPORTED_MAX:
                self._reported.pop(next(iter(self._reported)))
        self._steps.append(step)
        self._to_abandon.update(dict.fromkeys(step.abandon))

    def loaded(self) -> set[str]:
        """Engine requests whose loads are over. Empty after :meth:`failed_pages`, which is the last call of a step."""
        return set() if self._steps_reported else {request for step in self._steps for request in step.loaded}

    def failed(self) -> set[str]:
        """Engine requests of which all pages must be computed. Empty after :meth:`failed_pages`."""
        return set() if self._steps_reported else {request for step in self._steps for request in step.failed}

    def failed_pages(self) -> set[int]:
        """Pages of loads that are over and must be computed."""
        self._steps_reported = True
        return {page for step in self._steps for page in step.failed_pages}

    def to_abandon(self) -> list[int]:
        """Requests whose pages must be taken back; unchanged until :meth:`handed_over`."""
        return list(self._to_abandon)

    def handed_over(self) -> None:
        """Drops the requests of :meth:`to_abandon`, which the rank's session has taken."""
        self._to_abandon.clear()

    def are_over(self, requests: Iterable[int]) -> None:
        """Records that nothing is copied for these requests any longer."""
        self._over.update(dict.fromkeys(request for request in requests if request not in self._reported))

    def summed(self, checksums: Mapping[int, dict[int, tuple[int, bytes | None]]]) -> None:
        """Records checksums that this rank has taken, as in :attr:`RankReport.checksums`."""
        self._checksums.update(checksums)

    def report(self, fault: str) -> RankReport | None:
        """Returns the report for the scheduler's side; None when there is nothing to report."""
        self._over_reported = True
        reported, self._fault_reported = self._fault_reported, bool(fault)
        self._stepped_now = max((step.written_through for step in self._steps), default=self._stepped)
        stepped = self._stepped_now if self._stepped_now > self._stepped else 0
        if not self._over and not self._checksums and not stepped and (reported or not fault):
            return None
        return RankReport(dict.fromkeys(self._over, 1), fault, stepped, dict(self._checksums))
